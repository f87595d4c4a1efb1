// What a capture costs with frame objects and line numbers: the reference that
// capture_cost.py compares with. It uses the interpreter's public API alone.

#include <Python.h>
#include <frameobject.h>

#include <chrono>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr std::size_t kMaxFrames = 32;

using Stack = std::vector<std::pair<PyCodeObject*, int>>;

struct Hash {
  std::size_t operator()(const Stack& stack) const {
    std::uint64_t hash = 0xcbf29ce484222325;
    for (const auto& [code, line] : stack) {
      hash = (hash ^ reinterpret_cast<std::uintptr_t>(code)) * 0x100000001b3;
      hash = (hash ^ static_cast<std::uint64_t>(line)) * 0x100000001b3;
    }
    return hash;
  }
};

std::unordered_map<Stack, std::uint32_t, Hash> ids;

std::uint32_t capture() {
  Stack stack;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame != nullptr && stack.size() < kMaxFrames) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    stack.emplace_back(code, PyFrame_GetLineNumber(frame));
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return ids.try_emplace(std::move(stack), ids.size() + 1).first->second;
}

} // namespace

// Seconds that `n` captures of the calling stack take. Needs the GIL.
extern "C" double time_frame_object_walks(long n) {
  const auto begin = std::chrono::steady_clock::now();
  for (long i = 0; i < n; ++i) {
    capture();
  }
  const std::chrono::duration<double> elapsed =
      std::chrono::steady_clock::now() - begin;
  return elapsed.count();
}
