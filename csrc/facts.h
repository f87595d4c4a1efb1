// The facts about the running MLX that an attach relies on. Each is checked
// before a word is changed, and noted for those who ask what was found.

#pragma once

#include <functional>
#include <string>
#include <vector>

#include "image.h"

namespace mlxmem {

struct Fact {
  std::string group; // what it is about
  std::string text;
  std::string found; // an address, a name, a number; may be empty
  std::string otherwise; // what is said where it does not hold
  bool holds = false;

  bool operator==(const Fact& other) const {
    return group == other.group && text == other.text && found == other.found &&
        otherwise == other.otherwise && holds == other.holds;
  }
};

using FactVisitor = std::function<void(const Fact&)>;

// Throws AttachError with the text `otherwise` when the fact does not hold.
void require(
    bool holds,
    const std::string& text,
    const std::string& found,
    const std::string& otherwise);

// What the next facts are about.
void begin_facts(const char* group);

// Notes the facts that are checked while it lives, in that order; one that is
// checked again stands once. One at a time, by the thread that attaches.
class FactNotes {
 public:
  // visit is called with each one at once: should the next check end the
  // process, what was found until then is known.
  explicit FactNotes(std::vector<Fact>* facts, FactVisitor visit = {});
  ~FactNotes();
  FactNotes(const FactNotes&) = delete;
  FactNotes& operator=(const FactNotes&) = delete;

 private:
  friend void begin_facts(const char* group);
  friend void require(
      bool holds,
      const std::string& text,
      const std::string& found,
      const std::string& otherwise);

  const char* group_ = "";
  std::vector<Fact>* facts_;
  FactVisitor visit_;
};

std::string file_name(const Image& image);

// An address as found: "libmlx.so+0x12345" inside the image, else the number.
std::string place(const Image& image, const void* address);

} // namespace mlxmem
