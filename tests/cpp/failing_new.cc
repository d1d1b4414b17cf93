#include "failing_new.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)

bool fail_new(int) { return false; }

#else

#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

thread_local int left = -1;

}  // namespace

bool fail_new(int n) {
  left = n;
  return true;
}

void* operator new(size_t bytes) {
  if (left >= 0 && left-- == 0) throw std::bad_alloc();
  void* memory = std::malloc(bytes > 0 ? bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

#endif
