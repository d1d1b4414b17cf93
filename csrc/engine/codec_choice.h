#ifndef KVXFER_ENGINE_CODEC_CHOICE_H_
#define KVXFER_ENGINE_CODEC_CHOICE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "kvxfer/agent.h"

namespace kvxfer {

struct Pipeline {
  std::optional<double> link;  // bytes a second; none: not known
  CodecRates rates;            // of all threads on both sides; 0: not known, and no limit
  double bytes = 0;            // to move
  double coded_bytes = 0;      // what the recommended codec would make of them
};

struct CodecChoice {
  Codec codec = Codec::kRaw;
  std::string why;
};

// What moves the bytes in less time, when all stages work at once. Coding must win by a tenth: it
// costs precision.
CodecChoice choose_codec(const Pipeline& pipeline);

}  // namespace kvxfer

#endif  // KVXFER_ENGINE_CODEC_CHOICE_H_
