#include "codec/float_bits.h"

#include "kvxfer/status.h"

namespace kvxfer {

const SmallFloat& small_float(ElementType element) {
  switch (element) {
    case ElementType::kFloat16: return kFloat16;
    case ElementType::kBFloat16: return kBFloat16;
    case ElementType::kFloat8E4M3FN: return kFloat8E4M3FN;
    case ElementType::kFloat8E4M3FNUZ: return kFloat8E4M3FNUZ;
    case ElementType::kFloat8E5M2: return kFloat8E5M2;
    case ElementType::kFloat8E5M2FNUZ: return kFloat8E5M2FNUZ;
    case ElementType::kFloat32:
    case ElementType::kUInt8: break;
  }
  throw Error(StatusCode::kInvalid,
              std::string(element_name(element)) + " is not a float of at most 16 bits");
}

}  // namespace kvxfer
