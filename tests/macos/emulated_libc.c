// What an emulated process of macOS calls most of libSystem: memory, text, and
// locks that the one thread there is always gets. Compiled for macOS on arm64
// and run by the emulator, since a call out of it takes some 20 microseconds.

#include <stddef.h>
#include <stdint.h>

// ---- memory ----------------------------------------------------------------

// The emulator maps the heap and tells where it is.
char* emulated_heap;
char* emulated_heap_end;

// Blocks of 16 bytes, 32, 64 and so on, each after a word with its class. What
// is aligned more lies in a block, after a word that says so and its address.
enum { kClasses = 48, kHead = 16, kAligned = kClasses };
static void* free_blocks[kClasses];

static int class_of(size_t size) {
  int found = 0;
  while (((size_t)16 << found) < size) {
    ++found;
  }
  return found;
}

void* malloc(size_t size) {
  int which = class_of(size);
  void* block = free_blocks[which];
  if (block) {
    free_blocks[which] = *(void**)block;
    return block;
  }
  size_t whole = kHead + ((size_t)16 << which);
  if (whole > (size_t)(emulated_heap_end - emulated_heap)) {
    return NULL;
  }
  char* made = emulated_heap + kHead;
  emulated_heap += whole;
  *(uint64_t*)(made - kHead) = which;
  return made;
}

static uint64_t* head_of(void* block) {
  return (uint64_t*)((char*)block - kHead);
}

void free(void* block) {
  if (block && *head_of(block) == kAligned) {
    block = (void*)head_of(block)[1];
  }
  if (block) {
    uint64_t which = *head_of(block);
    *(void**)block = free_blocks[which];
    free_blocks[which] = block;
  }
}

void* memset(void* to, int value, size_t size) {
  volatile char* out = to; // or the compiler calls memset here
  while (size--) {
    *out++ = (char)value;
  }
  return to;
}

void bzero(void* to, size_t size) {
  memset(to, 0, size);
}

void* memmove(void* to, const void* from, size_t size) {
  volatile char* out = to;
  const volatile char* in = from;
  if (out <= in) {
    for (size_t i = 0; i < size; ++i) {
      out[i] = in[i];
    }
  } else {
    while (size--) {
      out[size] = in[size];
    }
  }
  return to;
}

void* memcpy(void* to, const void* from, size_t size) {
  return memmove(to, from, size);
}

void* calloc(size_t count, size_t size) {
  void* block = malloc(count * size);
  return block ? memset(block, 0, count * size) : NULL;
}

void* realloc(void* block, size_t size) {
  void* moved = malloc(size);
  if (moved && block) {
    size_t old = (size_t)16 << *head_of(block);
    memmove(moved, block, old < size ? old : size);
    free(block);
  }
  return moved;
}

void* aligned_alloc(size_t alignment, size_t size) {
  char* block = malloc(alignment <= 16 ? size : size + alignment);
  uintptr_t past = (uintptr_t)block % alignment;
  if (block && past) {
    char* aligned = block + alignment - past;
    head_of(aligned)[0] = kAligned;
    head_of(aligned)[1] = (uint64_t)block;
    block = aligned;
  }
  return block;
}

int memcmp(const void* a, const void* b, size_t size) {
  const unsigned char* x = a;
  const unsigned char* y = b;
  for (size_t i = 0; i < size; ++i) {
    if (x[i] != y[i]) {
      return x[i] - y[i];
    }
  }
  return 0;
}

void* memchr(const void* in, int value, size_t size) {
  const unsigned char* x = in;
  for (size_t i = 0; i < size; ++i) {
    if (x[i] == (unsigned char)value) {
      return (void*)(x + i);
    }
  }
  return NULL;
}

// ---- text ------------------------------------------------------------------

size_t strnlen(const char* text, size_t most) {
  size_t length = 0;
  while (length < most && text[length]) {
    ++length;
  }
  return length;
}

size_t strlen(const char* text) {
  return strnlen(text, SIZE_MAX);
}

int strncmp(const char* a, const char* b, size_t most) {
  for (size_t i = 0; i < most; ++i) {
    if (a[i] != b[i] || !a[i]) {
      return (unsigned char)a[i] - (unsigned char)b[i];
    }
  }
  return 0;
}

int strcmp(const char* a, const char* b) {
  return strncmp(a, b, SIZE_MAX);
}

char* strstr(const char* in, const char* text) {
  size_t length = strlen(text);
  for (; strncmp(in, text, length) != 0; ++in) {
    if (!*in) {
      return NULL;
    }
  }
  return (char*)in;
}

// ---- one thread ------------------------------------------------------------

static const void* values[64];
static uint64_t n_keys;

int pthread_key_create(uint64_t* key, void* destructor) {
  (void)destructor;
  *key = n_keys++;
  return n_keys <= 64 ? 0 : 1;
}

int pthread_setspecific(uint64_t key, const void* value) {
  values[key] = value;
  return 0;
}

const void* pthread_getspecific(uint64_t key) {
  return values[key];
}

void* pthread_self(void) {
  return values;
}

unsigned pthread_mach_thread_np(void* thread) {
  return thread ? 1 : 0;
}

void* newlocale(int mask, const char* name, void* base) {
  (void)mask, (void)name, (void)base;
  return values;
}

int ___mb_cur_max_l(void* locale) {
  (void)locale;
  return 1;
}

#define SUCCEEDS(name) \
  int name(void* it) { \
    (void)it;          \
    return 0;          \
  }
SUCCEEDS(pthread_mutex_init)
SUCCEEDS(pthread_mutex_lock)
SUCCEEDS(pthread_mutex_trylock)
SUCCEEDS(pthread_mutex_unlock)
SUCCEEDS(pthread_mutex_destroy)
SUCCEEDS(pthread_mutexattr_init)
SUCCEEDS(pthread_mutexattr_settype)
SUCCEEDS(pthread_mutexattr_destroy)
SUCCEEDS(pthread_cond_signal)
SUCCEEDS(pthread_cond_broadcast)
SUCCEEDS(pthread_cond_destroy)
SUCCEEDS(pthread_rwlock_rdlock)
SUCCEEDS(pthread_rwlock_wrlock)
SUCCEEDS(pthread_rwlock_unlock)
SUCCEEDS(pthread_atfork)
SUCCEEDS(__cxa_atexit)
SUCCEEDS(_tlv_atexit)
SUCCEEDS(mbtowc_l)
