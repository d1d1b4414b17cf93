#ifndef KVXFER_TESTS_GPU_ALIGNED_BYTES_H_
#define KVXFER_TESTS_GPU_ALIGNED_BYTES_H_

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>

namespace kvxfer::gpu {

// Bytes that begin at a multiple of 64 and end where the sanitizer sees it; a known value at first.
class AlignedBytes {
 public:
  explicit AlignedBytes(size_t size, unsigned char value = 0xa5)
      : size_(size),
        data_(static_cast<std::byte*>(::operator new(std::max<size_t>(size, 1), kAlignment))) {
    std::memset(data_.get(), value, size);
  }

  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }

  friend bool operator==(const AlignedBytes& a, const AlignedBytes& b) {
    return a.size_ == b.size_ && std::memcmp(a.data(), b.data(), a.size_) == 0;
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(std::byte* bytes) const { ::operator delete(bytes, kAlignment); }
  };
  size_t size_;
  std::unique_ptr<std::byte, Free> data_;
};

}  // namespace kvxfer::gpu

#endif  // KVXFER_TESTS_GPU_ALIGNED_BYTES_H_
