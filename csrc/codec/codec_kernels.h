#ifndef KVXFER_CODEC_CODEC_KERNELS_H_
#define KVXFER_CODEC_CODEC_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "base/digest_kernels.h"
#include "kvxfer/codec.h"

namespace kvxfer {

// A panel to encode: where its rows lie, and where its codes and its scales go. What fills up to 16
// bytes is not the kernels' business.
struct EncodeJob {
  ScaleFormat scale = ScaleFormat::kBFloat16;
  uint32_t group = 0;  // 1 to `content`
  const std::byte* const* row = nullptr;
  uint32_t rows = 0;  // 1 to kMaxPanelRows
  uint32_t content = 0;
  std::byte* codes = nullptr;
  std::byte* scales = nullptr;
};

// The reverse.
struct DecodeJob {
  ScaleFormat scale = ScaleFormat::kBFloat16;
  uint32_t group = 0;
  std::byte* const* row = nullptr;
  uint32_t rows = 0;
  uint32_t content = 0;
  const std::byte* codes = nullptr;
  const std::byte* scales = nullptr;
};

using EncodeKernel = RowMask (*)(const EncodeJob&);
// Adds to `clamped`. Returns false, having written anything into the rows, for a panel that holds
// what no encoder of ours makes or what the consumer's type can't hold: the scalar kernel then does
// it.
using DecodeKernel = bool (*)(const DecodeJob&, uint64_t& clamped);
// Wide elements of two types: `count` of them. Returns how many were clamped.
using ConvertKernel = uint64_t (*)(const std::byte* from, uint32_t count, std::byte* to);

// Divides `count` floats by a scale, given its inverse, and rounds to an 8-bit float. The same.
using Float8Kernel = uint64_t (*)(const float* values, float inverse, uint32_t count,
                                  std::byte* to);

constexpr size_t float8_index(ElementType element) {
  return static_cast<size_t>(element) - static_cast<size_t>(ElementType::kFloat8E4M3FN);
}

// One SIMD variant, indexed by Scheme less one by ElementType (float32,
// float16, bfloat16) and by float8_index().
constexpr size_t kWideElements = 3;
struct CodecKernels {
  const StripeKernels* stripes;  // the variant of the digest that it goes with
  EncodeKernel encode[kNumSchemes - 1][kWideElements];
  DecodeKernel decode[kNumSchemes - 1][kWideElements];
  ConvertKernel convert[kWideElements][kWideElements];
  Float8Kernel to_float8[4];
};

// `Variant` has encode, decode and convert as static templates over what the tables are indexed by.
template <class Variant>
constexpr CodecKernels make_codec(const StripeKernels& stripes) {
  CodecKernels made = {&stripes, {}, {}, {}, {}};
  const auto add_element = [&]<ElementType kElement>() {
    constexpr auto kIndex = static_cast<size_t>(kElement);
    made.encode[0][kIndex] = &Variant::template encode<Scheme::kFloat8E4M3, kElement>;
    made.encode[1][kIndex] = &Variant::template encode<Scheme::kFloat8E5M2, kElement>;
    made.encode[2][kIndex] = &Variant::template encode<Scheme::kInt8, kElement>;
    made.encode[3][kIndex] = &Variant::template encode<Scheme::kInt8Channel, kElement>;
    made.decode[0][kIndex] = &Variant::template decode<Scheme::kFloat8E4M3, kElement>;
    made.decode[1][kIndex] = &Variant::template decode<Scheme::kFloat8E5M2, kElement>;
    made.decode[2][kIndex] = &Variant::template decode<Scheme::kInt8, kElement>;
    made.decode[3][kIndex] = &Variant::template decode<Scheme::kInt8Channel, kElement>;
    made.convert[kIndex][0] = &Variant::template convert<kElement, ElementType::kFloat32>;
    made.convert[kIndex][1] = &Variant::template convert<kElement, ElementType::kFloat16>;
    made.convert[kIndex][2] = &Variant::template convert<kElement, ElementType::kBFloat16>;
  };
  add_element.template operator()<ElementType::kFloat32>();
  add_element.template operator()<ElementType::kFloat16>();
  add_element.template operator()<ElementType::kBFloat16>();
  made.to_float8[0] = &Variant::template to_float8<ElementType::kFloat8E4M3FN>;
  made.to_float8[1] = &Variant::template to_float8<ElementType::kFloat8E4M3FNUZ>;
  made.to_float8[2] = &Variant::template to_float8<ElementType::kFloat8E5M2>;
  made.to_float8[3] = &Variant::template to_float8<ElementType::kFloat8E5M2FNUZ>;
  return made;
}

extern const CodecKernels kScalarCodec;
#if defined(__x86_64__)
extern const CodecKernels kAvx2Codec;
extern const CodecKernels kAvx512Codec;
#elif defined(__aarch64__)
extern const CodecKernels kNeonCodec;
#endif

// The variant in use: simd_variant() of digest.h says which, for the digest and for these.
const CodecKernels& codec_kernels();

}  // namespace kvxfer

#endif  // KVXFER_CODEC_CODEC_KERNELS_H_
