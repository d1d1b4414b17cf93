#ifndef KVXFER_CODEC_FLOAT_MODE_H_
#define KVXFER_CODEC_FLOAT_MODE_H_

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace kvxfer {

// Rounding to nearest even with subnormal numbers kept, as the format wants it, while this lives:
// callers may run with something else (PyTorch's set_flush_denormal() changes the whole thread).
class FloatMode {
 public:
  FloatMode() : before_(read()) {
    if (before_ != wanted()) write(wanted());
  }
  ~FloatMode() {
    if (before_ != wanted()) write(before_);
  }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#if defined(__x86_64__)
  // The six sticky flags are not settings.
  static constexpr uint64_t kFlags = 0x3f;
  static uint64_t read() { return _mm_getcsr() & ~kFlags; }
  static void write(uint64_t mode) { _mm_setcsr(static_cast<uint32_t>(mode)); }
  static constexpr uint64_t wanted() { return 0x1f80; }  // all exceptions masked
#elif defined(__aarch64__)
  static uint64_t read() {
    uint64_t mode = 0;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void write(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
  static constexpr uint64_t wanted() { return 0; }
#else
  static uint64_t read() { return 0; }
  static void write(uint64_t) {}
  static constexpr uint64_t wanted() { return 0; }
#endif

  uint64_t before_;
};

}  // namespace kvxfer

#endif  // KVXFER_CODEC_FLOAT_MODE_H_
