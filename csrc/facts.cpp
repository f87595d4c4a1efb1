#include "facts.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "patch_set.h"

namespace mlxmem {

namespace {

FactNotes* notes = nullptr;

} // namespace

void require(
    bool holds,
    const std::string& text,
    const std::string& found,
    const std::string& otherwise) {
  if (notes) {
    Fact fact{notes->group_, text, found, otherwise, holds};
    auto& facts = *notes->facts_;
    if (std::find(facts.begin(), facts.end(), fact) == facts.end()) {
      facts.push_back(std::move(fact));
      if (notes->visit_) {
        notes->visit_(facts.back());
      }
    }
  }
  if (!holds) {
    throw AttachError(otherwise);
  }
}

void begin_facts(const char* group) {
  if (notes) {
    notes->group_ = group;
  }
}

FactNotes::FactNotes(std::vector<Fact>* facts, FactVisitor visit)
    : facts_(facts), visit_(std::move(visit)) {
  facts_->clear();
  notes = this;
}

FactNotes::~FactNotes() {
  notes = nullptr;
}

std::string file_name(const Image& image) {
  return image.path().substr(image.path().rfind('/') + 1);
}

std::string place(const Image& image, const void* address) {
  if (!address) {
    return "nothing";
  }
  auto number = reinterpret_cast<uintptr_t>(address);
  std::string file;
  if (image.contains(address)) {
    file = file_name(image) + "+";
    number -= image.base();
  }
  char text[32];
  std::snprintf(text, sizeof(text), "0x%" PRIxPTR, number);
  return file + text;
}

} // namespace mlxmem
