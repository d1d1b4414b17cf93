#ifndef KVXFER_PACK_GPU_CHUNK_ENDS_H_
#define KVXFER_PACK_GPU_CHUNK_ENDS_H_

// What a coded chunk has besides its panels: the header, and the rows that go raw. A workgroup a
// chunk: one pass behind the panels when packing, one before and one behind when unpacking. Rows
// that go raw are rare, and moved an element at a time.

#include "pack/gpu_panel_rows.h"

namespace kvxfer::gpu {

constexpr uint32_t kFirstPanelWord = 3;  // of the header, in words of 4 bytes
constexpr uint32_t kPanelsWord = 4;
constexpr uint32_t kExceptionsWord = 5;

// The sum of `value` over this thread and those before it; `total` over all of the workgroup.
KVXFER_DEVICE uint32_t scan_group(uint32_t value, uint32_t& total) {
  KVXFER_SHARED uint32_t sums[kThreads];
  const uint32_t thread = thread_id();
  barrier();  // the scan before is over
  sums[thread] = value;
  for (uint32_t step = 1; step < kThreads; step *= 2) {
    barrier();
    const uint32_t before = thread >= step ? sums[thread - step] : 0;
    barrier();
    sums[thread] += before;
  }
  barrier();
  total = sums[kThreads - 1];
  return sums[thread];
}

// The panel that row `row` < chunk.rows of a chunk belongs to.
KVXFER_DEVICE const PanelEntry& entry_of_row(const PanelLaunch& launch, const PanelChunk& chunk,
                                             uint32_t row) {
  const PanelEntry* entries = launch.entries + chunk.first_entry;
  uint32_t low = 0, high = chunk.panels;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (entries[middle].first_row <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return entries[low];
}

KVXFER_DEVICE uint32_t raw_row_bytes(const PanelLaunch& launch, const PanelEntry& entry) {
  const PanelKind& kind = launch.kinds[entry.kind];
  return kind.content * element_size(kind.producer);
}

KVXFER_DEVICE uint32_t header_word(const PanelLaunch& launch, const PanelChunk& chunk,
                                   uint32_t exceptions, uint32_t word) {
  if (word == kFirstPanelWord) return chunk.first_panel;
  if (word == kPanelsWord) return chunk.panels;
  if (word == kExceptionsWord) return exceptions;
  return load<uint32_t>(launch.header + word * 4);
}

// All but the panels, up to the end of the last stripe, which is filled up with zeros.
KVXFER_DEVICE void digest_ends(const PanelLaunch& launch, const PanelChunk& chunk,
                               uint32_t chunk_index, uint32_t bytes) {
  WordDigest digest;
  const char* wire = address_of(chunk.wire);
  digest.enter(launch.states, chunk_index, 0);
  digest_words(digest, wire, 0, launch.header_bytes);
  digest_words(digest, wire, chunk.panels_end, bytes);
  const uint32_t missing = (0 - bytes) % 64 / 8;  // words; the first of them is lane 8 - missing
  if (thread_id() < 8 && thread_id() >= 8 - missing) {
    digest.add(bytes / 64 * 64 + thread_id() * 8, Vec8{});
  }
  digest.leave(launch.states);
}

KVXFER_DEVICE void store_zeros(char* wire, uint32_t begin, uint32_t end) {
  if (begin + thread_id() < end) store<uint8_t>(wire + begin + thread_id(), 0);
}

// Calls visit(number, row, entry, at) for each marked row of the chunk, of which there are at most
// `most`: the how manieth it is, and where its bytes lie if the first one's lie at `begin`. Returns
// where the last one's end. All threads take part, each with rows of its own.
template <class Visit>
KVXFER_DEVICE uint32_t visit_marked(const PanelLaunch& launch, const PanelChunk& chunk,
                                    uint32_t most, uint32_t begin, Visit visit) {
  uint32_t found = 0;
  for (uint32_t first = 0; first < chunk.rows && found < most; first += kThreads) {
    const uint32_t row = first + thread_id();
    const bool goes = row < chunk.rows && load<uint8_t>(address_of(chunk.marks + row)) != 0;
    const PanelEntry& entry = entry_of_row(launch, chunk, goes ? row : 0);
    const uint32_t bytes = goes ? raw_row_bytes(launch, entry) : 0;
    uint32_t rows_here = 0, bytes_here = 0;
    const uint32_t number = found + scan_group(goes ? 1 : 0, rows_here) - 1;
    const uint32_t at = begin + scan_group(bytes, bytes_here) - bytes;
    if (goes) visit(number, row, entry, at);
    found += rows_here;
    begin += bytes_here;
  }
  return begin;
}

// Behind the panels of a chunk that is packed. group_x() is the chunk.
KVXFER_DEVICE void finish_chunk(const PanelLaunch& launch) {
  const PanelChunk chunk = launch.chunks[group_x()];
  PanelState& state = launch.states[group_x()];
  const uint32_t exceptions = state.exceptions;
  char* wire = address_of(chunk.wire);
  for (uint32_t word = thread_id(); word < launch.header_bytes / 4; word += kThreads) {
    store<uint32_t>(wire + word * 4, header_word(launch, chunk, exceptions, word));
  }
  const uint32_t raw_begin = chunk.panels_end + up16(4 * exceptions);
  const auto copy_row = [&](uint32_t number, uint32_t row, const PanelEntry& entry, uint32_t at) {
    store<uint32_t>(wire + chunk.panels_end + number * 4, row);
    const uint32_t size = element_size(launch.kinds[entry.kind].producer);
    const char* from = row_at(launch, entry, launch.views[entry.view], row - entry.first_row);
    for (uint32_t i = 0; i < raw_row_bytes(launch, entry); i += size) {
      store_bits(wire + at + i, size, load_bits(from + i, size));
    }
  };
  const uint32_t raw_end = visit_marked(launch, chunk, exceptions, raw_begin, copy_row);
  const uint32_t bytes = up16(raw_end);
  store_zeros(wire, chunk.panels_end + 4 * exceptions, raw_begin);
  store_zeros(wire, raw_end, bytes);
  if (thread_id() == 0) state.bytes = bytes;
  barrier();
  digest_ends(launch, chunk, group_x(), bytes);
}

// Before the panels of a chunk that is unpacked: refuses what the host's check_header() and
// read_indices() would, and marks the rows that it brings as they are, so that nobody looks at the
// indices again, which the peer may change. group_x() is the chunk.
KVXFER_DEVICE void check_chunk(const PanelLaunch& launch) {
  KVXFER_SHARED uint32_t wrong;
  KVXFER_SHARED uint32_t raw_bytes;
  KVXFER_SHARED uint32_t found;
  const PanelChunk chunk = launch.chunks[group_x()];
  PanelState& state = launch.states[group_x()];
  const char* wire = address_of(chunk.wire);
  if (chunk.bytes < chunk.panels_end) {
    if (thread_id() == 0) state.refused = 1;
    return;
  }
  if (thread_id() == 0) {
    wrong = raw_bytes = 0;
    found = load<uint32_t>(wire + kExceptionsWord * 4);  // once: the peer may write meanwhile
  }
  barrier();
  const uint32_t exceptions = found;
  for (uint32_t word = thread_id(); word < launch.header_bytes / 4; word += kThreads) {
    const uint32_t expected = header_word(launch, chunk, exceptions, word);
    if (load<uint32_t>(wire + word * 4) != expected) or_shared(&wrong, 1);
  }
  const uint32_t most = (chunk.bytes - chunk.panels_end) / 4;
  if (exceptions > chunk.rows || exceptions > most) {
    or_shared(&wrong, 1);
  } else {
    const char* indices = wire + chunk.panels_end;
    for (uint32_t i = thread_id(); i < exceptions; i += kThreads) {
      const uint32_t row = load<uint32_t>(indices + i * 4);
      const bool ascends = i == 0 || load<uint32_t>(indices + i * 4 - 4) < row;
      if (row >= chunk.rows || !ascends) {
        or_shared(&wrong, 1);
        continue;
      }
      const PanelEntry& entry = entry_of_row(launch, chunk, row);
      if (launch.kinds[entry.kind].scheme == kRaw) or_shared(&wrong, 1);
      store<uint8_t>(address_of(chunk.marks + row), 1);
      add_shared(&raw_bytes, raw_row_bytes(launch, entry));
    }
  }
  barrier();
  const uint32_t expected = chunk.panels_end + up16(4 * exceptions) + up16(raw_bytes);
  const bool refused = wrong != 0 || chunk.bytes != expected;
  if (thread_id() == 0) {
    state.exceptions = exceptions;
    state.bytes = chunk.bytes;
    state.refused = refused ? 1 : 0;
  }
  if (!refused) digest_ends(launch, chunk, group_x(), chunk.bytes);
}

// Behind the panels of a chunk that is unpacked.
KVXFER_DEVICE void put_raw_rows(const PanelLaunch& launch) {
  const PanelChunk chunk = launch.chunks[group_x()];
  PanelState& state = launch.states[group_x()];
  if (state.refused != 0 || state.exceptions == 0) return;
  const char* wire = address_of(chunk.wire);
  uint32_t clamped = 0;
  const auto put_row = [&](uint32_t, uint32_t row, const PanelEntry& entry, uint32_t from) {
    const PanelKind& kind = launch.kinds[entry.kind];
    const PanelView& view = launch.views[entry.view];
    const uint32_t size = element_size(kind.producer);
    const uint32_t own = element_size(kind.own);
    char* to = row_at(launch, entry, view, row - entry.first_row);
    for (uint32_t c = 0; c < kind.content; ++c) {
      const uint32_t bits = load_bits(wire + from + c * size, size);
      if (kind.producer == kind.own) {
        store_bits(to + c * own, own, bits);
      } else {
        const float value = element_value(bits, kind.producer) * view.inverse;
        store_bits(to + c * own, own, to_element(value, kind.own, clamped));
      }
    }
  };
  visit_marked(launch, chunk, state.exceptions, chunk.panels_end + up16(4 * state.exceptions),
               put_row);
  if (clamped != 0) add_global(&state.clamped, uint64_t{clamped});
}

}  // namespace kvxfer::gpu

#endif  // KVXFER_PACK_GPU_CHUNK_ENDS_H_
