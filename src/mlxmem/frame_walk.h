/* The running thread's Python stack, read from the interpreter's own chain.
 *
 * A frame is kept as one or two machine words that need no reference count and
 * no line number:
 *   3.11 and later   the address of the instruction. Bytecode lies inside its
 *                    code object, so the address names the code object too.
 *   3.10             the code object, then the instruction's index. Bytecode is
 *                    a bytes object there, which code objects may share.
 * The words stay valid for as long as somebody owns the code objects.
 */
#pragma once

#include <Python.h>
#include <frameobject.h>
#include <stddef.h>
#include <stdint.h>

#if PY_VERSION_HEX < 0x030A0000
#error "mlxmem needs Python 3.10 or later"
#endif

/* Python versions whose frame layout is known. A free-threaded build is left to
 * the portable walk: its bytecode need not lie inside the code object. Define
 * it as 0 to test that walk. */
#ifndef MLXMEM_FAST_WALK
#if PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED)
#define MLXMEM_FAST_WALK 1
#else
#define MLXMEM_FAST_WALK 0
#endif
#endif

#if MLXMEM_FAST_WALK && PY_VERSION_HEX >= 0x030B0000
#ifndef Py_BUILD_CORE
#define Py_BUILD_CORE 1
#define MLXMEM_UNDEF_BUILD_CORE
#endif
#include "internal/pycore_frame.h"
#ifdef MLXMEM_UNDEF_BUILD_CORE
#undef Py_BUILD_CORE
#undef MLXMEM_UNDEF_BUILD_CORE
#endif
#endif

#define MLXMEM_MAX_FRAMES 32

#if PY_VERSION_HEX >= 0x030B0000
#define MLXMEM_FRAME_WORDS 1
#else
#define MLXMEM_FRAME_WORDS 2
#endif

typedef struct {
  uint64_t hash; /* of the words */
  int count; /* frames */
  uintptr_t words[MLXMEM_MAX_FRAMES * MLXMEM_FRAME_WORDS]; /* innermost first */
  PyCodeObject* codes[MLXMEM_MAX_FRAMES]; /* borrowed */
} mlxmem_stack;

/* The context of the calling thread's captures. initial-exec: it is read by
 * each of them. */
static __thread uint32_t mlxmem_context
    __attribute__((tls_model("initial-exec")));

/* FNV-1a, 64 bit, public-domain parameters (Fowler, Noll, Vo). */
#define MLXMEM_FNV_OFFSET 0xcbf29ce484222325ULL
#define MLXMEM_FNV_PRIME 0x100000001b3ULL

/* The thread state that this thread holds the GIL with, else NULL. Takes no
 * lock and reads nothing that another thread may free. */
static inline PyThreadState* mlxmem_attached_state(void) {
#if PY_VERSION_HEX >= 0x030D0000
  return PyThreadState_GetUnchecked();
#elif PY_VERSION_HEX >= 0x030C0000
  return _PyThreadState_UncheckedGet();
#else
  /* The current state is one global here, that of whoever holds the GIL.
   * PyGILState_Check() is no substitute: it always says yes once a
   * subinterpreter was made. */
  PyThreadState* current = _PyThreadState_UncheckedGet();
  if (current == NULL || current != PyGILState_GetThisThreadState()) {
    return NULL;
  }
  return current;
#endif
}

static inline int mlxmem_is_finalizing(void) {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

/* The attached thread state if it belongs to `owner` and Python is neither
 * starting nor stopping, else NULL. */
static inline PyThreadState* mlxmem_capturing_state(
    const PyInterpreterState* owner) {
  PyThreadState* state = mlxmem_attached_state();
  if (state == NULL || state->interp != owner || mlxmem_is_finalizing()) {
    return NULL;
  }
  return state;
}

/* Byte offset of an instruction, as PyCode_Addr2Line takes it. */
static inline int mlxmem_byte_offset(
    PyCodeObject* code,
    const uintptr_t* words) {
#if PY_VERSION_HEX >= 0x030B0000
  return (int)((intptr_t)words[0] - (intptr_t)&code->co_code_adaptive);
#else
  (void)code;
  /* f_lasti counts instructions. */
  return (int)(intptr_t)words[1] * (int)sizeof(_Py_CODEUNIT);
#endif
}

/* The two words of 3.10 are mixed outside of the chain of multiplications and
 * folded as one; they are still compared as two. The factor spreads the index,
 * a small number, over the word. */
static inline uint64_t mlxmem_fold(uint64_t hash, const uintptr_t* words) {
#if PY_VERSION_HEX >= 0x030B0000
  return (hash ^ words[0]) * MLXMEM_FNV_PRIME;
#else
  return (hash ^ words[0] ^ words[1] * 0x9e3779b97f4a7c15ULL) *
      MLXMEM_FNV_PRIME;
#endif
}

/* The innermost frames by the interpreter's public API. It makes frame objects,
 * which costs much more than reading the chain. */
static void mlxmem_walk_portable(mlxmem_stack* stack) {
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  stack->hash = MLXMEM_FNV_OFFSET;
  stack->count = 0;
  while (frame != NULL && stack->count < MLXMEM_MAX_FRAMES) {
    uintptr_t* words = stack->words + stack->count * MLXMEM_FRAME_WORDS;
    PyCodeObject* code = PyFrame_GetCode(frame);
    Py_DECREF(code); /* the running frame owns it */
#if PY_VERSION_HEX >= 0x030B0000
    words[0] = (uintptr_t)&code->co_code_adaptive +
        (uintptr_t)(intptr_t)PyFrame_GetLasti(frame);
#else
    words[0] = (uintptr_t)code;
    words[1] = (uintptr_t)(intptr_t)frame->f_lasti;
#endif
    stack->hash = mlxmem_fold(stack->hash, words);
    stack->codes[stack->count] = code;
    ++stack->count;
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
}

#if MLXMEM_FAST_WALK

#if PY_VERSION_HEX >= 0x030B0000
typedef struct _PyInterpreterFrame mlxmem_frame;
#define MLXMEM_PREVIOUS(frame) ((frame)->previous)
#else
typedef struct _frame mlxmem_frame;
#define MLXMEM_PREVIOUS(frame) ((frame)->f_back)
#endif

static inline mlxmem_frame* mlxmem_innermost(PyThreadState* state) {
#if PY_VERSION_HEX >= 0x030D0000
  return state->current_frame;
#elif PY_VERSION_HEX >= 0x030B0000
  return state->cframe->current_frame;
#else
  return state->frame;
#endif
}

#if PY_VERSION_HEX >= 0x030D0000
#define MLXMEM_CODE(frame) ((PyCodeObject*)(frame)->f_executable)
#define MLXMEM_INSTRUCTION(frame) ((uintptr_t)(frame)->instr_ptr)
#else
#define MLXMEM_CODE(frame) ((frame)->f_code)
#define MLXMEM_INSTRUCTION(frame) ((uintptr_t)(frame)->prev_instr)
#endif

/* Whether an entry of the chain is a Python frame. A shim of the C stack is
 * none, nor is a frame whose function has not begun yet: its cells or its
 * generator are still being made (a finalizer can run meanwhile). */
static inline int mlxmem_is_complete(mlxmem_frame* frame) {
#if PY_VERSION_HEX >= 0x030D0000
  if (!PyCode_Check(frame->f_executable)) {
    return 0;
  }
#endif
#if PY_VERSION_HEX >= 0x030B0000
  PyCodeObject* code = MLXMEM_CODE(frame);
  uintptr_t begins = (uintptr_t)&code->co_code_adaptive +
      (uintptr_t)code->_co_firsttraceable * sizeof(_Py_CODEUNIT);
  return MLXMEM_INSTRUCTION(frame) >= begins ||
      frame->owner == FRAME_OWNED_BY_GENERATOR;
#else
  (void)frame;
  return 1;
#endif
}

/* As mlxmem_is_complete, but by what the frame itself says: frames that have
 * not begun pass. Looking into 32 code objects costs a third of a capture. */
static inline int mlxmem_is_no_shim(mlxmem_frame* frame) {
#if PY_VERSION_HEX >= 0x030C0000
  return frame->owner != FRAME_OWNED_BY_CSTACK;
#else
  (void)frame;
  return 1;
#endif
}

static inline void mlxmem_read_words(mlxmem_frame* frame, uintptr_t* words) {
#if PY_VERSION_HEX >= 0x030B0000
  words[0] = MLXMEM_INSTRUCTION(frame);
#else
  words[0] = (uintptr_t)frame->f_code;
  words[1] = (uintptr_t)(intptr_t)frame->f_lasti;
#endif
}

/* The innermost frames, without code objects. Frames that have not begun are
 * among them, at instructions where no complete frame stands: such a stack
 * equals none that mlxmem_walk_exact returns, and must not be kept. */
static inline void mlxmem_walk_quick(
    PyThreadState* state,
    mlxmem_stack* stack) {
  uint64_t hash = MLXMEM_FNV_OFFSET;
  uintptr_t* words = stack->words;
  uintptr_t* end = words + MLXMEM_MAX_FRAMES * MLXMEM_FRAME_WORDS;
  mlxmem_frame* frame = mlxmem_innermost(state);
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC unroll 4
#endif
  for (; frame != NULL; frame = MLXMEM_PREVIOUS(frame)) {
    if (mlxmem_is_no_shim(frame)) {
      mlxmem_read_words(frame, words);
      hash = mlxmem_fold(hash, words);
      words += MLXMEM_FRAME_WORDS;
      if (words == end) {
        break;
      }
    }
  }
  stack->hash = hash;
  stack->count = (int)(words - stack->words) / MLXMEM_FRAME_WORDS;
}

/* The innermost frames and their code objects, as mlxmem_walk_portable sees
 * them, without a frame object. */
static inline void mlxmem_walk_exact(
    PyThreadState* state,
    mlxmem_stack* stack) {
  mlxmem_frame* frame = mlxmem_innermost(state);
  stack->hash = MLXMEM_FNV_OFFSET;
  stack->count = 0;
  for (; frame != NULL && stack->count < MLXMEM_MAX_FRAMES;
       frame = MLXMEM_PREVIOUS(frame)) {
    if (mlxmem_is_complete(frame)) {
      uintptr_t* words = stack->words + stack->count * MLXMEM_FRAME_WORDS;
      mlxmem_read_words(frame, words);
      stack->hash = mlxmem_fold(stack->hash, words);
      stack->codes[stack->count] = MLXMEM_CODE(frame);
      ++stack->count;
    }
  }
}

#else

static inline void mlxmem_walk_quick(
    PyThreadState* state,
    mlxmem_stack* stack) {
  (void)state;
  mlxmem_walk_portable(stack);
}

static inline void mlxmem_walk_exact(
    PyThreadState* state,
    mlxmem_stack* stack) {
  (void)state;
  mlxmem_walk_portable(stack);
}

#endif /* MLXMEM_FAST_WALK */

/* For benchmarks only: follows the chain and reads nothing else. The least
 * that any walk can cost. */
static inline uintptr_t mlxmem_benchmark_chase(PyThreadState* state) {
#if MLXMEM_FAST_WALK
  int count = 0;
  mlxmem_frame* frame = mlxmem_innermost(state);
  while (frame != NULL && count < MLXMEM_MAX_FRAMES) {
    frame = MLXMEM_PREVIOUS(frame);
    ++count;
  }
  return (uintptr_t)frame + (uintptr_t)count;
#else
  return (uintptr_t)state;
#endif
}
