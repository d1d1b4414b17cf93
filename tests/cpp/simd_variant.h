#ifndef KVXFER_TESTS_CPP_SIMD_VARIANT_H_
#define KVXFER_TESTS_CPP_SIMD_VARIANT_H_

#include <string>

#include "kvxfer/digest.h"

namespace kvxfer {

// Has the SIMD variant of that name in use while this lives.
class SimdVariant {
 public:
  explicit SimdVariant(const std::string& name) : before_(simd_variant()) {
    set_simd_variant(name);
  }
  ~SimdVariant() { set_simd_variant(before_); }
  SimdVariant(const SimdVariant&) = delete;
  SimdVariant& operator=(const SimdVariant&) = delete;

 private:
  std::string before_;
};

}  // namespace kvxfer

#endif  // KVXFER_TESTS_CPP_SIMD_VARIANT_H_
