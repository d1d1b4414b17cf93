#ifndef KVXFER_BENCHES_GPU_CUDA_SUPPORT_H_
#define KVXFER_BENCHES_GPU_CUDA_SUPPORT_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

namespace kvxfer::bench {

inline void check(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s: %s\n", what, cudaGetErrorName(result), cudaGetErrorString(result));
  std::exit(2);
}

// Device memory, freed at the end.
class DeviceBytes {
 public:
  explicit DeviceBytes(size_t bytes) : bytes_(bytes) {
    check(cudaMalloc(&data_, std::max<size_t>(bytes, 16)), "cudaMalloc");
  }
  template <class T>
  explicit DeviceBytes(const std::vector<T>& from) : DeviceBytes(from.size() * sizeof(T)) {
    upload(from.data());
  }
  DeviceBytes(DeviceBytes&& other) noexcept : data_(other.data_), bytes_(other.bytes_) {
    other.data_ = nullptr;
  }
  DeviceBytes& operator=(DeviceBytes&&) = delete;
  ~DeviceBytes() {
    if (data_ != nullptr) cudaFree(data_);
  }

  void upload(const void* from) {
    check(cudaMemcpy(data_, from, bytes_, cudaMemcpyHostToDevice), "upload");
  }
  void download(void* to) const { download(to, 0, bytes_); }
  void download(void* to, size_t begin, size_t bytes) const {
    check(cudaMemcpy(to, data() + begin, bytes, cudaMemcpyDeviceToHost), "download");
  }
  void fill(int value) { check(cudaMemset(data_, value, bytes_), "cudaMemset"); }

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  uint64_t address() const { return reinterpret_cast<uintptr_t>(data_); }
  size_t size() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

// Median milliseconds of `work`, which only launches.
inline double time_ms(const std::function<void()>& work, int repeats = 15) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<double> times;
  for (int i = -3; i < repeats; ++i) {
    check(cudaEventRecord(begin), "cudaEventRecord");
    work();
    check(cudaEventRecord(end), "cudaEventRecord");
    check(cudaEventSynchronize(end), "cudaEventSynchronize");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    if (i >= 0) times.push_back(ms);
  }
  check(cudaGetLastError(), "launch");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return median(times);
}

// Milliseconds to copy as many bytes as are read plus written, within the device.
inline double copy_ms(uint64_t bytes_moved) {
  const size_t half = bytes_moved / 2;
  DeviceBytes from(half), to(half);
  from.fill(0x35);
  return time_ms([&] {
    check(cudaMemcpyAsync(to.data(), from.data(), half, cudaMemcpyDeviceToDevice), "copy");
  });
}

inline int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::atoll(text) : otherwise;
}

// One row of the table, and one line of JSON for machines.
struct Result {
  std::string shape, layout, work;
  uint32_t block_size = 0;
  uint64_t bytes_moved = 0;  // read plus written
  double ms = 0, copy = 0;

  double rate() const { return static_cast<double>(bytes_moved) / ms * 1e-6; }  // GB/s
  double percent() const { return 100.0 * copy / ms; }

  void print() const {
    std::printf("| %-18s | %-10s | %3u | %-20s | %8.1f | %7.3f | %7.0f | %5.1f %% |\n",
                shape.c_str(), layout.c_str(), block_size, work.c_str(),
                static_cast<double>(bytes_moved) / 1e6, ms, rate(), percent());
    std::fflush(stdout);
    if (const char* path = std::getenv("KVXFER_BENCH_JSON"); path != nullptr && *path != '\0') {
      if (FILE* file = std::fopen(path, "a")) {
        std::fprintf(
            file,
            "{\"shape\": \"%s\", \"layout\": \"%s\", \"block_size\": %u, \"work\": \"%s\", "
            "\"bytes_moved\": %llu, \"ms\": %.5f, \"gb_per_s\": %.1f, "
            "\"percent_of_copy\": %.2f}\n",
            shape.c_str(), layout.c_str(), block_size, work.c_str(),
            static_cast<unsigned long long>(bytes_moved), ms, rate(), percent());
        std::fclose(file);
      }
    }
  }
};

inline void print_table_head() {
  std::printf("| shape | layout | block | work | MB moved | ms | GB/s | of a copy |\n");
  std::printf("|---|---|---|---|---|---|---|---|\n");
}

}  // namespace kvxfer::bench

#endif  // KVXFER_BENCHES_GPU_CUDA_SUPPORT_H_
