#ifndef KVXFER_BASE_CPU_FEATURES_H_
#define KVXFER_BASE_CPU_FEATURES_H_

namespace kvxfer {

// Instruction sets that both the CPU has and the operating system saves on a context switch.
struct CpuFeatures {
  bool avx2 = false;         // with FMA and F16C, as every CPU that has it
  bool avx512 = false;       // F, BW, DQ, VL
  bool avx512_bf16 = false;  // and AVX512_BF16
  bool neon = false;
};

// Detected once. Thread-safe.
const CpuFeatures& cpu_features();

}  // namespace kvxfer

#endif  // KVXFER_BASE_CPU_FEATURES_H_
