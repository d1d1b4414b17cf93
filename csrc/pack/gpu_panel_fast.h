#ifndef KVXFER_PACK_GPU_PANEL_FAST_H_
#define KVXFER_PACK_GPU_PANEL_FAST_H_

// Panels of the schemes with one scale for a row, of 16-bit elements, a multiple of 64 of them in a
// row, at addresses that are multiples of 16: elements are read and codes written once.

#include "pack/gpu_panel_rows.h"

namespace kvxfer::gpu {

constexpr uint32_t kTeam = 8;  // threads that encode a row together, so that its words are theirs
constexpr uint32_t kTeams = kThreads / kTeam;

template <uint32_t kElement>
KVXFER_DEVICE float wide_value(uint32_t bits) {
  if constexpr (kElement == kBFloat16) {
    return bits_float(bits << 16);
  } else {
    return half_float(bits);
  }
}

template <uint32_t kElement>
KVXFER_DEVICE float low_value(uint32_t word) {
  return wide_value<kElement>(kElement == kBFloat16 ? word : word & 0xffff);
}

template <uint32_t kElement>
KVXFER_DEVICE float high_value(uint32_t word) {
  if constexpr (kElement == kBFloat16) return bits_float(word & 0xffff0000);
  return wide_value<kElement>(word >> 16);
}

KVXFER_DEVICE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

KVXFER_DEVICE uint32_t largest_magnitude(const Vec16& elements, uint32_t amax) {
  KVXFER_UNROLL
  for (uint32_t i = 0; i < 4; ++i) {
    amax = larger(amax, elements.word[i] & 0x7fff);
    amax = larger(amax, elements.word[i] >> 16 & 0x7fff);
  }
  return amax;
}

template <uint32_t kScheme, uint32_t kElement>
KVXFER_DEVICE Vec8 encode8(const Vec16& elements, float inverse) {
  Vec8 codes;
  KVXFER_UNROLL
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t low = elements.word[2 * i];
    const uint32_t high = elements.word[2 * i + 1];
    codes.word[i] =
        encode4<kScheme>(low_value<kElement>(low) * inverse, high_value<kElement>(low) * inverse,
                         low_value<kElement>(high) * inverse, high_value<kElement>(high) * inverse);
  }
  return codes;
}

// Rows of 64 * kN elements.
template <uint32_t kScheme, uint32_t kElement, uint32_t kN>
KVXFER_DEVICE void pack_rows(const PanelLaunch& launch) {
  constexpr uint32_t kRows = kN == 1 ? 4 : kN <= 4 ? 2 : 1;  // of a team at once
  constexpr uint32_t kContent = 64 * kN;
  constexpr uint32_t kLimit = kElement == kFloat16 ? 30u << 10 : 227u << 7;
  // Two, so that one barrier a panel is enough.
  KVXFER_SHARED uint64_t scales[2][kMostPanelRows / 2];
  const uint32_t team = thread_id() / kTeam;
  const uint32_t member = thread_id() % kTeam;
  WordDigest digest;
  const uint32_t begin = group_x() * launch.per_group;
  for (uint32_t i = begin; i < begin + launch.per_group && i < launch.count; ++i) {
    const PanelEntry entry = launch.entries[launch.order[i]];
    const PanelView view = launch.views[entry.view];
    const PanelKind kind = launch.kinds[entry.kind];
    const PanelChunk chunk = launch.chunks[entry.chunk];
    const uint32_t format = kind.scale_format;
    char* wire = address_of(chunk.wire);
    char* shared_scales = reinterpret_cast<char*>(scales[i % 2]);
    digest.enter(launch.states, entry.chunk, entry.wire / 8 % 8);
    for (uint32_t first = 0; first < entry.rows; first += kTeams * kRows) {
      Vec16 elements[kRows][kN];
      KVXFER_UNROLL
      for (uint32_t r = 0; r < kRows; ++r) {
        const uint32_t row = first + r * kTeams + team;
        const char* from = row_at(launch, entry, view, row < entry.rows ? row : 0);
        KVXFER_UNROLL
        for (uint32_t n = 0; n < kN; ++n) {
          elements[r][n] = load_once<Vec16>(from + (n * kTeam + member) * 16);
        }
      }
      KVXFER_UNROLL
      for (uint32_t r = 0; r < kRows; ++r) {
        const uint32_t row = first + r * kTeams + team;
        uint32_t amax = 0;
        KVXFER_UNROLL
        for (uint32_t n = 0; n < kN; ++n) amax = largest_magnitude(elements[r][n], amax);
        KVXFER_UNROLL
        for (uint32_t mask = 1; mask < kTeam; mask *= 2) {
          amax = larger(amax, shuffle_xor(amax, mask));
        }
        const bool raw = amax >= kLimit;
        const float scale =
            make_scale(raw ? 0.0f : wide_value<kElement>(amax), largest_code(kScheme), format);
        const float inverse = 1.0f / scale;
        if (row < entry.rows) {
          if (member == 0) {
            const uint32_t bits = float_bits(scale) >> scale_shift(format);
            const uint32_t size = scale_size(format);
            char* to = shared_scales + row * size;
            if (size == 4) {
              *reinterpret_cast<uint32_t*>(to) = bits;
            } else if (size == 2) {
              *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(bits);
            } else {
              *reinterpret_cast<uint8_t*>(to) = static_cast<uint8_t>(bits);
            }
            if (raw) {
              store<uint8_t>(address_of(chunk.marks + entry.first_row + row), 1);
              add_global(&launch.states[entry.chunk].exceptions, 1u);
            }
          }
          const uint32_t at = entry.wire + row * kContent + member * 8;
          KVXFER_UNROLL
          for (uint32_t n = 0; n < kN; ++n) {
            Vec8 codes = {};
            if (!raw) codes = encode8<kScheme, kElement>(elements[r][n], inverse);
            store_once<Vec8>(wire + at + n * kTeam * 8, codes);
            digest.add(at + n * kTeam * 8, codes);
          }
        }
      }
    }
    barrier();
    const uint32_t bytes = entry.rows * scale_size(format);
    const uint32_t at = entry.wire + entry.rows * kContent;
    for (uint32_t word = thread_id(); word < up16(bytes) / 8; word += kThreads) {
      uint64_t value = word * 8 < bytes ? scales[i % 2][word] : 0;
      const uint32_t left = bytes - word * 8;
      if (word * 8 < bytes && left < 8) value &= (uint64_t{1} << left * 8) - 1;
      const Halves both = halves(value);
      const Vec8 codes = {{both.low, both.high}};
      store<Vec8>(wire + at + word * 8, codes);
      digest.add(at + word * 8, codes);
    }
  }
  digest.leave(launch.states);
}

// The common case costs no more than the arithmetic; what has no number takes the long way.
template <uint32_t kScheme>
KVXFER_DEVICE bool all_finite(uint32_t codes) {
  if constexpr (kScheme == kE4M3) {
    return (((codes & 0x7f7f7f7f) + 0x01010101) & 0x80808080) == 0;
  } else if constexpr (kScheme == kE5M2) {
    return (((codes & 0x7f7f7f7f) + 0x04040404) & 0x80808080) == 0;
  } else {
    return true;
  }
}

template <uint32_t kScheme>
KVXFER_DEVICE float decode_finite(uint32_t code) {
  if constexpr (kScheme == kInt8) {
    return decode<kInt8>(code);
  } else {
    constexpr uint32_t kMantissa = kScheme == kE4M3 ? 3 : 2;
    constexpr uint32_t kBias = kScheme == kE4M3 ? 7 : 15;
    return with_sign(small_magnitude(code & 0x7f, kMantissa, kBias), (code & 0x80) != 0);
  }
}

template <uint32_t kElement>
KVXFER_DEVICE uint32_t to_wide(float value, uint32_t& clamped) {
  if constexpr (kElement == kBFloat16) {
    return to_bfloat16(value, clamped);
  } else {
    return to_float16(value, clamped);
  }
}

template <uint32_t kScheme, uint32_t kElement>
KVXFER_DEVICE Vec16 decode8(const Vec8& codes, float scale, uint32_t& clamped) {
  Vec16 elements;
  KVXFER_UNROLL
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t pair = codes.word[i / 2] >> (i % 2 * 16);
    float low = 0, high = 0;
    if (all_finite<kScheme>(codes.word[i / 2])) {
      low = decode_finite<kScheme>(pair & 0xff);
      high = decode_finite<kScheme>(pair >> 8 & 0xff);
    } else {
      low = decode<kScheme>(pair & 0xff);
      high = decode<kScheme>(pair >> 8 & 0xff);
    }
    elements.word[i] =
        to_wide<kElement>(low * scale, clamped) | to_wide<kElement>(high * scale, clamped) << 16;
  }
  return elements;
}

template <uint32_t kScheme, uint32_t kElement>
KVXFER_DEVICE void unpack_rows(const PanelLaunch& launch) {
  WordDigest digest;
  uint32_t clamped = 0;
  const uint32_t begin = group_x() * launch.per_group;
  for (uint32_t i = begin; i < begin + launch.per_group && i < launch.count; ++i) {
    const PanelEntry entry = launch.entries[launch.order[i]];
    if (launch.states[entry.chunk].refused != 0) continue;
    const PanelView view = launch.views[entry.view];
    const PanelKind kind = launch.kinds[entry.kind];
    const char* wire = address_of(launch.chunks[entry.chunk].wire);
    const uint32_t format = kind.scale_format;
    const uint32_t content = kind.content;
    const uint32_t codes_bytes = entry.rows * content;
    const char* scales = wire + entry.wire + codes_bytes;
    digest.enter(launch.states, entry.chunk, entry.wire / 8 % 8);
    const uint32_t words = codes_bytes / 8;
    const uint32_t row_words = content / 8;
    for (uint32_t first = 0; first < words; first += kThreads * kUnroll) {
      Vec8 codes[kUnroll];
      KVXFER_UNROLL
      for (uint32_t k = 0; k < kUnroll; ++k) {
        const uint32_t word = first + k * kThreads + thread_id();
        if (word < words) codes[k] = load_once<Vec8>(wire + entry.wire + word * 8);
      }
      KVXFER_UNROLL
      for (uint32_t k = 0; k < kUnroll; ++k) {
        const uint32_t word = first + k * kThreads + thread_id();
        if (word >= words) continue;
        const uint32_t row = word / row_words;
        const float scale = load_scale(scales + row * scale_size(format), format);
        char* to = row_at(launch, entry, view, row) + (word - row * row_words) * 16;
        store_once<Vec16>(to, decode8<kScheme, kElement>(codes[k], scale, clamped));
        digest.add(entry.wire + word * 8, codes[k]);
      }
    }
    const uint32_t scale_bytes = up16(entry.rows * scale_size(format));
    digest_words(digest, wire, entry.wire + codes_bytes, entry.wire + codes_bytes + scale_bytes);
    if (clamped != 0) {
      add_global(&launch.states[entry.chunk].clamped, uint64_t{clamped});
      clamped = 0;
    }
  }
  digest.leave(launch.states);
}

}  // namespace kvxfer::gpu

#endif  // KVXFER_PACK_GPU_PANEL_FAST_H_
