// Attaches to the images of macOS's MLX that are mapped into this process, by
// csrc's own code for macOS: all of it but what asks dyld or calls MLX, which
// stands here. Takes commands by lines and answers each with a line of JSON;
// who asks reads this process's memory itself.
//
//   emulated_attach LIBMLX LIBRARY...

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "attach.h"
#include "mapped_image.h"
#include "mlx_checks.h"
#include "originals.h"
#include "page_protection.h"
#include "probes.h"

// What the process defines on a Mac, where it is Python.
extern "C" {
__attribute__((visibility("default"))) void* PyEval_SaveThread() {
  return nullptr;
}
__attribute__((visibility("default"))) void PyEval_RestoreThread(void*) {}
}

namespace mlxmem {

namespace {

// ---- the images -------------------------------------------------------------

// What an import of a library that isn't here points to: where type information
// is expected, it is some of a class without a base, of an unknown kind.
struct Stub {
  void* kind;
  const char* name;
  void* base;
  void* rest[5];
};
constexpr size_t kMaxStubs = 1 << 14;
Stub stubs[kMaxStubs];

std::deque<MappedImage> mapped;
std::vector<Image> images;

void* stub(const std::string& name) {
  static auto* places = new std::map<std::string, size_t>;
  size_t at = places->emplace(name, places->size()).first->second;
  if (at == kMaxStubs) {
    throw MapError("there are too many imports");
  }
  if (!stubs[at].name) {
    stubs[at].name = strdup(name.c_str());
  }
  return &stubs[at];
}

// As dyld would, which looks into the libraries that are loaded already.
void* resolve(const std::string& name) {
  if (name == abi::kReleaseGilSymbol) {
    return reinterpret_cast<void*>(&PyEval_SaveThread);
  }
  if (name == abi::kAcquireGilSymbol) {
    return reinterpret_cast<void*>(&PyEval_RestoreThread);
  }
  for (auto& image : images) {
    if (void* address = image.symbol(name.c_str())) {
      return address;
    }
  }
  return stub(name);
}

void load(const std::string& path) {
  mapped.emplace_back(path, resolve);
  Image image;
  if (!mapped.back().read(&image)) {
    throw MapError("mlxmem does not read this image");
  }
  images.push_back(image);
}

// ---- the allocator ----------------------------------------------------------

// MLX makes its own on the heap; nothing but its first word is looked at.
void** allocator = new void*[64]();

constexpr const char* kMetalAllocatorTypeName =
    "N3mlx4core5metal14MetalAllocatorE";

void make_allocator() {
  for_each_vtable(images[0], abi::kAllocatorSlots, [](void** vtable) {
    auto type = type_of_vtable(vtable);
    if (images[0].contains(type->name()) &&
        std::strcmp(type->name(), kMetalAllocatorTypeName) == 0) {
      *allocator = vtable;
    }
  });
}

// ---- page protection --------------------------------------------------------

struct Request {
  uintptr_t begin;
  uintptr_t end;
  int protection;
};
std::vector<Request> requests;
int requests_until_refusal = 0; // 0: none is refused

// A word that somebody else changes as soon as its page is writable.
struct Interference {
  uintptr_t address = 0;
  uint64_t value = 0;
} interference;

void interfere(uintptr_t begin, uintptr_t end, int protection) {
  uintptr_t address = interference.address;
  if (protection & kPageWrite && address >= begin && address < end) {
    std::memcpy(
        reinterpret_cast<void*>(address),
        &interference.value,
        sizeof(interference.value));
    interference = {};
  }
}

} // namespace

MlxCore check_mlx_core(const std::vector<Image>& of_mlx) {
  MlxCore mlx = find_mlx_core(of_mlx);
  begin_facts("the allocator");
  use_allocator(&mlx, allocator);
  check_import_slots(mlx);
  return mlx;
}

std::vector<Image> Image::loaded(
    const std::function<bool(const Image&)>& wanted) {
  std::vector<Image> kept;
  for (auto& image : images) {
    if (wanted(image)) {
      kept.push_back(image);
    }
  }
  return kept;
}

std::vector<uintptr_t> Image::loaded_bases() {
  std::vector<uintptr_t> bases;
  for (auto& image : images) {
    bases.push_back(image.base());
  }
  return bases;
}

size_t page_size() {
  return 0x4000; // of a Mac
}

std::vector<int> page_protections(const std::vector<uintptr_t>& addresses) {
  FILE* maps = std::fopen("/proc/self/maps", "re");
  if (!maps) {
    throw AttachError("/proc/self/maps cannot be read");
  }
  std::vector<int> protections(addresses.size(), -1);
  char line[4096];
  while (std::fgets(line, sizeof(line), maps)) {
    unsigned long begin, end;
    char flags[5];
    if (std::sscanf(line, "%lx-%lx %4s", &begin, &end, flags) != 3) {
      continue;
    }
    for (size_t i = 0; i < addresses.size(); ++i) {
      if (addresses[i] >= begin && addresses[i] < end) {
        protections[i] = (flags[0] == 'r' ? kPageRead : 0) |
            (flags[1] == 'w' ? kPageWrite : 0) |
            (flags[2] == 'x' ? kPageExecute : 0);
      }
    }
  }
  std::fclose(maps);
  return protections;
}

int protect_pages(uintptr_t begin, uintptr_t end, int protection) {
  requests.push_back({begin, end, protection});
  if (requests_until_refusal && --requests_until_refusal == 0) {
    return EACCES;
  }
  int given = (protection & kPageRead ? PROT_READ : 0) |
      (protection & kPageWrite ? PROT_WRITE : 0);
  auto pages = reinterpret_cast<void*>(begin);
  if (mprotect(pages, end - begin, given) != 0) {
    return errno;
  }
  interfere(begin, end, protection);
  return 0;
}

std::string protection_error(int number) {
  return std::strerror(number);
}

namespace {

// ---- answers ----------------------------------------------------------------

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    out += c == '"' || c == '\\' ? std::string{'\\', c} : std::string{c};
  }
  return out + '"';
}

template <class T>
std::string number(T* address) {
  return std::to_string(reinterpret_cast<uintptr_t>(address));
}

template <class List, class Write>
std::string list(const List& items, const Write& write) {
  std::string out;
  for (auto& item : items) {
    out += (out.empty() ? "" : ", ") + write(item);
  }
  return "[" + out + "]";
}

std::string words(const std::vector<Patch>& patches) {
  return list(patches, [](const Patch& patch) {
    return "{\"address\": " + number(patch.address) +
        ", \"original\": " + number(patch.original) +
        ", \"replacement\": " + number(patch.replacement) +
        ", \"what\": " + quoted(patch.what) + "}";
  });
}

std::string bases() {
  return list(
      images, [](const Image& image) { return std::to_string(image.base()); });
}

// Where everything is that the images' words may point to.
std::string places() {
  auto probe = [](const char* name, auto function) {
    return quoted(name) + ": " + number(function);
  };
  return "{\"images\": " + bases() + ", \"allocator\": " + number(allocator) +
      ", \"probes\": {" + probe("operator_new", &probes::operator_new) + ", " +
      probe("release_gil", &probes::release_gil) + ", " +
      probe("acquire_gil", &probes::acquire_gil) + ", " +
      probe("malloc", &probes::malloc) + ", " + probe("free", &probes::free) +
      ", " + probe("make_buffer", &probes::make_buffer) + ", " +
      probe("release", &probes::release) + "}}";
}

std::string attached() {
  try {
    attach();
  } catch (const AttachError& error) {
    return "{\"refusal\": " + quoted(error.what()) + "}";
  }
  return "{\"refusal\": \"\"}";
}

std::string checked() {
  std::vector<Fact> noted;
  Check check = check_attach([&](const Fact& fact) { noted.push_back(fact); });
  auto facts = list(noted, [](const Fact& fact) {
    return "{\"group\": " + quoted(fact.group) +
        ", \"text\": " + quoted(fact.text) +
        ", \"found\": " + quoted(fact.found) +
        ", \"holds\": " + (fact.holds ? "true" : "false") + "}";
  });
  return "{\"facts\": " + facts + ", \"refusal\": " + quoted(check.refusal) +
      ", \"is_attached\": " + (check.is_attached ? "true" : "false") +
      ", \"words\": " + words(check.patches) + "}";
}

std::string asked_for() {
  auto answer = list(requests, [](const Request& request) {
    return "[" + std::to_string(request.begin) + ", " +
        std::to_string(request.end) + ", " +
        std::to_string(request.protection) + "]";
  });
  requests.clear();
  return "{\"requests\": " + answer + "}";
}

// Of which the page's protection is the same afterwards.
void write_word(uintptr_t address, uint64_t value) {
  uintptr_t begin = address & ~uintptr_t(sysconf(_SC_PAGESIZE) - 1);
  auto page = reinterpret_cast<void*>(begin);
  size_t size = address + sizeof(value) - begin; // two pages, it may be
  int before = page_protections({address})[0];
  if (mprotect(page, size, PROT_READ | PROT_WRITE) != 0) {
    throw MapError("the page cannot be written");
  }
  std::memcpy(reinterpret_cast<void*>(address), &value, sizeof(value));
  mprotect(page, size, before);
}

std::string answer(const std::string& line) {
  std::istringstream in(line);
  std::string command;
  in >> command;
  if (command == "places") {
    return places();
  }
  if (command == "attach") {
    return attached();
  }
  if (command == "attach-new") {
    return "{\"changed\": " + std::to_string(attach_new_images()) + "}";
  }
  if (command == "check") {
    return checked();
  }
  if (command == "detach") {
    return "{\"left\": " + quoted(detach()) + "}";
  }
  if (command == "words") {
    return "{\"words\": " + words(patched_words()) +
        ", \"backend\": " + quoted(backend()) + "}";
  }
  if (command == "requests") {
    return asked_for();
  }
  if (command == "refuse") { // the Nth request from now on
    in >> requests_until_refusal;
    return "{}";
  }
  if (command == "interfere") { // ADDRESS WORD
    in >> interference.address >> interference.value;
    return "{}";
  }
  if (command == "load") {
    std::string path;
    std::getline(in >> std::ws, path);
    load(path);
    return "{\"images\": " + bases() + "}";
  }
  if (command == "unload") { // the last one
    images.pop_back();
    mapped.pop_back();
    return "{\"images\": " + bases() + "}";
  }
  if (command == "write") { // ADDRESS WORD
    uint64_t address, value;
    in >> address >> value;
    write_word(address, value);
    return "{}";
  }
  throw MapError("there is no command " + command);
}

int run(int count, char** arguments) {
  for (int i = 1; i < count; ++i) {
    load(arguments[i]);
  }
  make_allocator();
  std::string line;
  while (std::getline(std::cin, line)) {
    std::cout << answer(line) << std::endl;
  }
  return 0;
}

} // namespace

} // namespace mlxmem

int main(int count, char** arguments) {
  try {
    return mlxmem::run(count, arguments);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
