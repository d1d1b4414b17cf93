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

KVXFER_DEVICE uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }
KVXFER_DEVICE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// Of even and of odd elements: in the two halves.
KVXFER_DEVICE uint32_t largest_magnitudes(const Vec16& elements, uint32_t amax) {
  KVXFER_UNROLL
  for (uint32_t i = 0; i < 4; ++i) amax = max_halves(amax, elements.word[i] & 0x7fff7fff);
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
  const uint32_t end = smaller(begin + launch.per_group, launch.count);
  PanelEntry next = launch.entries[launch.order[begin]];
  for (uint32_t i = begin; i < end; ++i) {
    const PanelEntry entry = next;
    if (i + 1 < end) next = launch.entries[launch.order[i + 1]];  // on its way meanwhile
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
        for (uint32_t n = 0; n < kN; ++n) amax = largest_magnitudes(elements[r][n], amax);
        amax = larger(amax & 0xffff, amax >> 16);
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

// Whether none of four codes is NaN or infinity.
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

// The value of a finite code in the upper 8 bits.
template <uint32_t kScheme>
KVXFER_DEVICE float decode_upper(uint32_t codes) {
  const auto signed_codes = static_cast<int32_t>(codes);
  if constexpr (kScheme == kInt8) {
    // Counts from 1.5 * 2^23, where the last place is 1; a conversion would take longer.
    return bits_float(0x4b400000u + static_cast<uint32_t>(signed_codes >> 24)) - 12582912.0f;
  } else if constexpr (kScheme == kE4M3) {
    return bits_float(static_cast<uint32_t>(signed_codes >> 4) & 0x87f00000) * 0x1p120f;
  } else {
    return bits_float(static_cast<uint32_t>(signed_codes >> 3) & 0x8fe00000) * 0x1p112f;
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

// `ordinary`: the scale is one of which no finite code becomes too large for bfloat16.
template <uint32_t kScheme, uint32_t kElement>
KVXFER_DEVICE Vec16 decode8(const Vec8& codes, float scale, bool ordinary, uint32_t& clamped) {
  Vec16 elements;
  KVXFER_UNROLL
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t word = codes.word[i];
    if (ordinary && all_finite<kScheme>(word)) {
      const float a = decode_upper<kScheme>(word << 24) * scale;
      const float b = decode_upper<kScheme>(word << 16) * scale;
      const float c = decode_upper<kScheme>(word << 8) * scale;
      const float d = decode_upper<kScheme>(word) * scale;
      if constexpr (kElement == kBFloat16) {
        elements.word[2 * i] = round_bfloat16x2(a, b);
        elements.word[2 * i + 1] = round_bfloat16x2(c, d);
      } else {
        elements.word[2 * i] = to_float16(a, clamped) | to_float16(b, clamped) << 16;
        elements.word[2 * i + 1] = to_float16(c, clamped) | to_float16(d, clamped) << 16;
      }
    } else {
      KVXFER_UNROLL
      for (uint32_t k = 0; k < 4; k += 2) {
        const float low = decode<kScheme>(word >> k * 8 & 0xff) * scale;
        const float high = decode<kScheme>(word >> (k + 1) * 8 & 0xff) * scale;
        elements.word[2 * i + k / 2] =
            to_wide<kElement>(low, clamped) | to_wide<kElement>(high, clamped) << 16;
      }
    }
  }
  return elements;
}

// Rows of 64 * kN elements.
template <uint32_t kScheme, uint32_t kElement, uint32_t kN>
KVXFER_DEVICE void unpack_rows(const PanelLaunch& launch) {
  constexpr uint32_t kRows = kN == 1 ? 4 : kN <= 4 ? 2 : 1;  // of a team at once
  constexpr uint32_t kContent = 64 * kN;
  const uint32_t team = thread_id() / kTeam;
  const uint32_t member = thread_id() % kTeam;
  WordDigest digest;
  uint32_t clamped = 0;
  const uint32_t begin = group_x() * launch.per_group;
  const uint32_t end = smaller(begin + launch.per_group, launch.count);
  PanelEntry next = launch.entries[launch.order[begin]];
  for (uint32_t i = begin; i < end; ++i) {
    const PanelEntry entry = next;
    if (i + 1 < end) next = launch.entries[launch.order[i + 1]];  // on its way meanwhile
    if (launch.states[entry.chunk].refused != 0) continue;
    const PanelView view = launch.views[entry.view];
    const uint32_t format = launch.kinds[entry.kind].scale_format;
    const char* wire = address_of(launch.chunks[entry.chunk].wire);
    const uint32_t scales = entry.wire + entry.rows * kContent;
    const RawRows raw_rows(launch, entry);
    digest.enter(launch.states, entry.chunk, entry.wire / 8 % 8);
    for (uint32_t first = 0; first < entry.rows; first += kTeams * kRows) {
      Vec8 codes[kRows][kN];
      float scale[kRows];
      char* to[kRows];  // null: the row goes raw
      KVXFER_UNROLL
      for (uint32_t r = 0; r < kRows; ++r) {
        const uint32_t given = first + r * kTeams + team;
        const uint32_t row = given < entry.rows ? given : 0;
        scale[r] = load_scale(wire + scales + row * scale_size(format), format);
        to[r] = raw_rows.has(row) ? nullptr : row_at(launch, entry, view, row) + member * 16;
        KVXFER_UNROLL
        for (uint32_t n = 0; n < kN; ++n) {
          codes[r][n] =
              load_once<Vec8>(wire + entry.wire + row * kContent + (n * kTeam + member) * 8);
        }
      }
      KVXFER_UNROLL
      for (uint32_t r = 0; r < kRows; ++r) {
        const uint32_t row = first + r * kTeams + team;
        if (row >= entry.rows) continue;
        const bool ordinary = float_bits(scale[r]) < 227u << 23;
        const uint32_t at = entry.wire + row * kContent + member * 8;
        KVXFER_UNROLL
        for (uint32_t n = 0; n < kN; ++n) {
          digest.add(at + n * kTeam * 8, codes[r][n]);
          if (to[r] == nullptr) continue;
          store_once<Vec16>(to[r] + n * kTeam * 16,
                            decode8<kScheme, kElement>(codes[r][n], scale[r], ordinary, clamped));
        }
      }
    }
    digest_words(digest, wire, scales, scales + up16(entry.rows * scale_size(format)));
    if (clamped != 0) {
      add_global(&launch.states[entry.chunk].clamped, uint64_t{clamped});
      clamped = 0;
    }
  }
  digest.leave(launch.states);
}

}  // namespace kvxfer::gpu

#endif  // KVXFER_PACK_GPU_PANEL_FAST_H_
