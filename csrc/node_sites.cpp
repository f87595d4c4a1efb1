#include "node_sites.h"

#include <algorithm>

#include "arm64_code.h"
#include "mlx_abi.h"

namespace mlxmem {

using namespace arm64;

namespace {

// mov w0 or x0 to the size of a node with its control block.
bool sets_node_size(uint32_t word) {
  constexpr uint32_t kMovToW0 = 0x52800000;
  constexpr uint32_t kMovToX0 = 0xD2800000;
  constexpr uint32_t kSize = abi::kNodeBlockSize << 5;
  return word == (kMovToW0 | kSize) || word == (kMovToX0 | kSize);
}

// A function that is called to construct a node: a constructor or a stub of it,
// or one around it, such as std::construct_at.
struct Constructing {
  uintptr_t begin;
  bool is_leaf;
  bool is_constructor;
  uintptr_t end = UINTPTR_MAX; // where the next function begins
};

struct ConstructorCall {
  uintptr_t at;
  bool is_leaf;
};

class Scan {
 public:
  Scan(
      const Image& image,
      void* const* operator_new_slot,
      const std::vector<NodeConstructor>& constructors)
      : image_(image) {
    for (auto& constructor : constructors) {
      functions_.push_back({constructor.address, constructor.is_leaf, true});
    }
    find_stubs(operator_new_slot, constructors);
  }

  NodeSites run() {
    find_calls();
    find_functions_around();
    NodeSites found;
    for (auto& made : made_) {
      if (auto function = known(made.constructs)) {
        found.sites.push_back({made.return_address, function->is_leaf});
      }
    }
    found.constructor_calls = count_calls();
    return found;
  }

 private:
  struct Made { // operator new was called for the size of a node
    uintptr_t return_address;
    uintptr_t constructs; // the function that is called next
  };

  void find_stubs(
      void* const* operator_new_slot,
      const std::vector<NodeConstructor>& constructors) {
    auto new_slot = reinterpret_cast<uintptr_t>(operator_new_slot);
    for_each_instruction(
        image_, [&](uintptr_t at, uint32_t, const MemoryRange& range) {
          if (at < range.begin + 2 * kInstruction) {
            return;
          }
          uintptr_t slot = slot_of_stub(at);
          uintptr_t stub = at - 2 * kInstruction;
          if (slot == 0 || slot % sizeof(void*) ||
              !image_.contains(reinterpret_cast<void*>(slot))) {
            return;
          }
          if (slot == new_slot) {
            new_stubs_.push_back(stub);
          }
          auto target = *reinterpret_cast<uintptr_t*>(slot);
          for (auto& constructor : constructors) {
            if (target == constructor.address) {
              functions_.push_back({stub, constructor.is_leaf, true});
            }
          }
        });
  }

  // Calls of constructors, and of operator new for a node.
  void find_calls() {
    uint32_t before = 0;
    Made* made = nullptr;
    for_each_instruction(
        image_, [&](uintptr_t at, uint32_t word, const MemoryRange&) {
          bool calls = is_call(word);
          if (calls || is_jump(word)) {
            uintptr_t target = target_of(at, word);
            // One form of a constructor may be a jump to the other.
            if (auto function = known(target); function && !known(at)) {
              calls_.push_back({at, function->is_leaf});
            }
            if (calls && made) {
              made->constructs = target;
              made = nullptr;
            }
            if (calls && sets_node_size(before) && is_new_stub(target)) {
              made_.push_back({at + kInstruction, 0});
              made = &made_.back();
            }
          }
          before = word;
        });
  }

  bool is_new_stub(uintptr_t address) const {
    return std::find(new_stubs_.begin(), new_stubs_.end(), address) !=
        new_stubs_.end();
  }

  // Of the functions that are called where memory for a node was got, those
  // that call one constructor.
  void find_functions_around() {
    std::vector<Constructing> around;
    for (auto& made : made_) {
      bool is_new = !known(made.constructs) &&
          std::none_of(around.begin(), around.end(), [&](auto& function) {
            return function.begin == made.constructs;
          });
      if (made.constructs && is_new) {
        around.push_back({made.constructs, false, false});
      }
    }
    // A function ends at the latest where another one begins that is called.
    for_each_instruction(
        image_, [&](uintptr_t at, uint32_t word, const MemoryRange&) {
          if (is_call(word)) {
            uintptr_t target = target_of(at, word);
            for (auto& function : around) {
              if (target > function.begin) {
                function.end = std::min(function.end, target);
              }
            }
          }
        });
    for (auto& function : around) {
      size_t n_calls = 0;
      for (auto& call : calls_) {
        if (call.at >= function.begin && call.at < function.end) {
          n_calls += 1;
          function.is_leaf = call.is_leaf;
        }
      }
      if (n_calls == 1) {
        functions_.push_back(function);
      }
    }
  }

  // Each call of a function around a constructor is one, and each call of a
  // constructor that is in no such function.
  size_t count_calls() const {
    size_t n = 0;
    for_each_instruction(
        image_, [&](uintptr_t at, uint32_t word, const MemoryRange&) {
          if (is_call(word) || is_jump(word)) {
            auto function = known(target_of(at, word));
            n += function && !function->is_constructor;
          }
        });
    for (auto& call : calls_) {
      n += std::none_of(
          functions_.begin(), functions_.end(), [&](auto& function) {
            return !function.is_constructor && call.at >= function.begin &&
                call.at < function.end;
          });
    }
    return n;
  }

  const Constructing* known(uintptr_t address) const {
    for (auto& function : functions_) {
      if (function.begin == address) {
        return &function;
      }
    }
    return nullptr;
  }

  const Image& image_;
  std::vector<uintptr_t> new_stubs_;
  std::vector<Constructing> functions_;
  std::vector<Made> made_;
  std::vector<ConstructorCall> calls_;
};

} // namespace

NodeSites find_node_sites(
    const Image& image,
    void* const* operator_new_slot,
    const std::vector<NodeConstructor>& constructors) {
  return Scan(image, operator_new_slot, constructors).run();
}

} // namespace mlxmem
