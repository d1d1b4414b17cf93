#ifndef KVXFER_PACK_GPU_PANEL_ANY_H_
#define KVXFER_PACK_GPU_PANEL_ANY_H_

// Panels of every scheme, element type, size and alignment, an element at a time, a workgroup a
// panel. The digest reads again what the workgroup has just written.

#include "pack/gpu_panel_rows.h"

namespace kvxfer::gpu {

struct PanelAt {
  PanelEntry entry;
  PanelView view;
  PanelKind kind;
  PanelSize size;
  char* wire;  // of the chunk

  KVXFER_DEVICE char* codes() const { return wire + entry.wire; }
  KVXFER_DEVICE char* scales() const { return codes() + up16(size.codes); }
  KVXFER_DEVICE uint32_t end() const { return entry.wire + up16(size.codes) + up16(size.scales); }
};

KVXFER_DEVICE PanelAt panel_at(const PanelLaunch& launch, uint32_t i) {
  PanelAt panel;
  panel.entry = launch.entries[launch.order[i]];
  panel.view = launch.views[panel.entry.view];
  panel.kind = launch.kinds[panel.entry.kind];
  panel.size = panel_size(panel.kind, panel.entry.rows);
  panel.wire = address_of(launch.chunks[panel.entry.chunk].wire);
  return panel;
}

KVXFER_DEVICE void zero_padding(char* from, uint32_t bytes) {
  const uint32_t at = bytes + thread_id();
  if (at < up16(bytes)) store<uint8_t>(from + at, 0);
}

template <uint32_t kScheme>
KVXFER_DEVICE uint32_t encode1(float scaled) {
  return encode4<kScheme>(scaled, 0.0f, 0.0f, 0.0f) & 0xff;
}

KVXFER_DEVICE uint32_t encode_by(uint32_t scheme, float scaled) {
  return scheme == kE4M3   ? encode1<kE4M3>(scaled)
         : scheme == kE5M2 ? encode1<kE5M2>(scaled)
                           : encode1<kInt8>(scaled);
}

KVXFER_DEVICE float decode_by(uint32_t scheme, uint32_t code) {
  return scheme == kE4M3   ? decode<kE4M3>(code)
         : scheme == kE5M2 ? decode<kE5M2>(code)
         : scheme == kInt8 ? decode<kInt8>(code)
                           : decode<kInt8Channel>(code);
}

KVXFER_DEVICE bool marked(const uint32_t* marks, uint32_t row) {
  return (marks[row / 32] >> row % 32 & 1) != 0;
}

// A scale for each row and group.
KVXFER_DEVICE void scale_rows(const PanelLaunch& launch, const PanelAt& panel,
                              const uint32_t* marks) {
  const PanelKind& kind = panel.kind;
  const uint32_t size = element_size(kind.producer);
  for (uint32_t i = thread_id(); i < panel.entry.rows * panel.size.groups; i += kThreads) {
    const uint32_t row = i / panel.size.groups;
    const uint32_t first = (i - row * panel.size.groups) * kind.group;
    const uint32_t end = first + kind.group < kind.content ? first + kind.group : kind.content;
    float amax = 0.0f;
    if (!marked(marks, row)) {
      const char* from = row_at(launch, panel.entry, panel.view, row);
      for (uint32_t c = first; c < end; ++c) {
        const float value = element_value(load_bits(from + c * size, size), kind.producer);
        const float magnitude = bits_float(float_bits(value) & kMagnitude);
        amax = magnitude > amax ? magnitude : amax;
      }
    }
    store_scale(make_scale(amax, largest_code(kind.scheme), kind.scale_format), kind.scale_format,
                panel.scales() + i * scale_size(kind.scale_format));
  }
}

// A scale and a zero point for each channel.
KVXFER_DEVICE void scale_channels(const PanelLaunch& launch, const PanelAt& panel,
                                  const uint32_t* marks) {
  const PanelKind& kind = panel.kind;
  const uint32_t size = element_size(kind.producer);
  const uint32_t bytes = scale_size(kind.scale_format);
  for (uint32_t c = thread_id(); c < kind.content; c += kThreads) {
    float low = 0.0f, high = 0.0f;
    bool any = false;
    for (uint32_t row = 0; row < panel.entry.rows; ++row) {
      if (marked(marks, row)) continue;
      const char* from = row_at(launch, panel.entry, panel.view, row) + c * size;
      const float value = element_value(load_bits(from, size), kind.producer);
      low = !any || value < low ? value : low;
      high = !any || value > high ? value : high;
      any = true;
    }
    const float zero = zero_down(low, kind.scale_format);
    const float scale = any ? make_scale(high - zero, 255.0f, kind.scale_format) : 0.0f;
    store_scale(scale, kind.scale_format, panel.scales() + c * bytes);
    store_scale(zero, kind.scale_format, panel.scales() + (kind.content + c) * bytes);
  }
}

KVXFER_DEVICE uint32_t encode_element(const PanelAt& panel, uint32_t row, uint32_t c, float value) {
  const PanelKind& kind = panel.kind;
  const uint32_t bytes = scale_size(kind.scale_format);
  if (kind.scheme == kInt8Channel) {
    const float scale = load_scale(panel.scales() + c * bytes, kind.scale_format);
    const float zero = load_scale(panel.scales() + (kind.content + c) * bytes, kind.scale_format);
    const int32_t code = round_even((value - zero) * (1.0f / scale));
    return static_cast<uint32_t>(code < 0 ? 0 : code > 255 ? 255 : code);
  }
  const uint32_t group = row * panel.size.groups + c / kind.group;
  const float scale = load_scale(panel.scales() + group * bytes, kind.scale_format);
  return encode_by(kind.scheme, value * (1.0f / scale));
}

KVXFER_DEVICE void pack_any_panel(const PanelLaunch& launch, const PanelAt& panel) {
  KVXFER_SHARED uint32_t marks[kMostPanelRows / 32];
  const PanelKind& kind = panel.kind;
  const uint32_t size = element_size(kind.producer);
  const uint32_t elements = panel.entry.rows * kind.content;
  const bool coded = kind.scheme != kRaw;
  barrier();  // the panel before is done with `marks`
  if (thread_id() < kMostPanelRows / 32) marks[thread_id()] = 0;
  barrier();
  if (coded) {
    for (uint32_t i = thread_id(); i < elements; i += kThreads) {
      const uint32_t row = i / kind.content;
      const char* from = row_at(launch, panel.entry, panel.view, row);
      if (goes_raw(load_bits(from + (i - row * kind.content) * size, size), kind.producer)) {
        or_shared(&marks[row / 32], 1u << row % 32);
      }
    }
    barrier();
    for (uint32_t row = thread_id(); row < panel.entry.rows; row += kThreads) {
      if (!marked(marks, row)) continue;
      const PanelChunk& chunk = launch.chunks[panel.entry.chunk];
      store<uint8_t>(address_of(chunk.marks + panel.entry.first_row + row), 1);
      add_global(&launch.states[panel.entry.chunk].exceptions, 1u);
    }
    if (kind.scheme == kInt8Channel) {
      scale_channels(launch, panel, marks);
    } else {
      scale_rows(launch, panel, marks);
    }
    zero_padding(panel.scales(), panel.size.scales);
    barrier();
  }
  for (uint32_t i = thread_id(); i < elements; i += kThreads) {
    const uint32_t row = i / kind.content;
    const uint32_t c = i - row * kind.content;
    const char* from = row_at(launch, panel.entry, panel.view, row) + c * size;
    const uint32_t bits = load_bits(from, size);
    if (!coded) {
      store_bits(panel.codes() + i * size, size, bits);
    } else {
      const bool zero = marked(marks, row);
      const uint32_t code =
          zero ? 0 : encode_element(panel, row, c, element_value(bits, kind.producer));
      store<uint8_t>(panel.codes() + i, static_cast<uint8_t>(code));
    }
  }
  zero_padding(panel.codes(), panel.size.codes);
  barrier();
}

KVXFER_DEVICE void pack_any(const PanelLaunch& launch) {
  WordDigest digest;
  const uint32_t begin = group_x() * launch.per_group;
  for (uint32_t i = begin; i < begin + launch.per_group && i < launch.count; ++i) {
    const PanelAt panel = panel_at(launch, i);
    digest.enter(launch.states, panel.entry.chunk, 0);
    pack_any_panel(launch, panel);
    digest_words(digest, panel.wire, panel.entry.wire, panel.end());
  }
  digest.leave(launch.states);
}

KVXFER_DEVICE float decoded_element(const PanelAt& panel, uint32_t row, uint32_t i) {
  const PanelKind& kind = panel.kind;
  if (kind.scheme == kRaw) {
    const uint32_t size = element_size(kind.producer);
    return element_value(load_bits(panel.codes() + i * size, size), kind.producer);
  }
  const uint32_t bytes = scale_size(kind.scale_format);
  const uint32_t c = i - row * kind.content;
  const float number = decode_by(kind.scheme, load<uint8_t>(panel.codes() + i));
  if (kind.scheme == kInt8Channel) {
    const float scale = load_scale(panel.scales() + c * bytes, kind.scale_format);
    const float zero = load_scale(panel.scales() + (kind.content + c) * bytes, kind.scale_format);
    return number * scale + zero;
  }
  const uint32_t group = row * panel.size.groups + c / kind.group;
  return number * load_scale(panel.scales() + group * bytes, kind.scale_format);
}

// In shared memory, where they take no registers.
KVXFER_DEVICE void find_raw_rows(const PanelLaunch& launch, const PanelEntry& entry,
                                 uint32_t* marks) {
  const RawRows raw(launch, entry);
  barrier();  // the panel before is done with `marks`
  if (thread_id() < kMostPanelRows / 32) marks[thread_id()] = 0;
  barrier();
  for (uint32_t row = thread_id(); row < entry.rows && raw.marks != 0; row += kThreads) {
    if (raw.has(row)) or_shared(&marks[row / 32], 1u << row % 32);
  }
  barrier();
}

KVXFER_DEVICE void unpack_any(const PanelLaunch& launch) {
  KVXFER_SHARED uint32_t marks[kMostPanelRows / 32];
  WordDigest digest;
  const uint32_t begin = group_x() * launch.per_group;
  for (uint32_t i = begin; i < begin + launch.per_group && i < launch.count; ++i) {
    const PanelAt panel = panel_at(launch, i);
    if (launch.states[panel.entry.chunk].refused != 0) continue;
    const PanelKind& kind = panel.kind;
    const uint32_t size = element_size(kind.own);
    const bool looked_up = kind.scheme == kRaw && panel.view.codes != 0;
    const bool copied = kind.scheme == kRaw && kind.producer == kind.own && !looked_up;
    find_raw_rows(launch, panel.entry, marks);
    uint32_t clamped = 0;  // or, from one 8-bit float to another, inexact
    digest.enter(launch.states, panel.entry.chunk, 0);
    for (uint32_t e = thread_id(); e < panel.entry.rows * kind.content; e += kThreads) {
      const uint32_t row = e / kind.content;
      if (marked(marks, row)) continue;
      char* to = row_at(launch, panel.entry, panel.view, row) + (e - row * kind.content) * size;
      if (copied) {
        store_bits(to, size, load_bits(panel.codes() + e * size, size));
      } else if (looked_up) {
        const uint32_t at = (panel.view.codes - 1) * 256 + load<uint8_t>(panel.codes() + e);
        const uint64_t code = load<uint64_t>(launch.codes + at);
        store_bits(to, size, static_cast<uint32_t>(code));
        clamped += (code & kCodeLoses) != 0;
      } else {
        const float value = decoded_element(panel, row, e) * panel.view.inverse;
        store_bits(to, size, to_element(value, kind.own, clamped));
      }
    }
    if (clamped != 0) {
      PanelState& state = launch.states[panel.entry.chunk];
      add_global(looked_up && size == 1 ? &state.inexact : &state.clamped, uint64_t{clamped});
    }
    digest_words(digest, panel.wire, panel.entry.wire, panel.end());
  }
  digest.leave(launch.states);
}

}  // namespace kvxfer::gpu

#endif  // KVXFER_PACK_GPU_PANEL_ANY_H_
