#ifndef KVXFER_PACK_GPU_PANEL_TABLE_H_
#define KVXFER_PACK_GPU_PANEL_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kvxfer/panel_plan.h"
#include "pack/gpu_tables.h"

namespace kvxfer {

// Panels of one plan, of any number of chunks, as kernels want them. The caller copies what it
// gives to the device once all chunks are added, and launches a kernel for each of orders().
class GpuPanelTable {
 public:
  // The plan must outlive it. Throws Error(kInvalid) for a plan that GPUs do not do: elements of a
  // row that lie apart or are not aligned to their size.
  explicit GpuPanelTable(const PanelPlan& plan);

  // Adds the chunk of panels [begin, end). `wire`, a multiple of 16, and `marks`, a byte for each
  // of its rows, are addresses on the device. `bytes` is how long the chunk is when it is unpacked.
  void add_chunk(uint32_t begin, uint32_t end, uint64_t wire, uint64_t marks, uint64_t bytes = 0);

  // Adds what the 8-bit floats of panels [begin, end) become; add_chunk() does so, too. Changes
  // codes() and views().
  void add_codes(uint32_t begin, uint32_t end);

  // Rows of panels [begin, end).
  uint32_t rows(uint32_t begin, uint32_t end) const;

  // By the name of the kernel that packs, or unpacks: the entries that it works on.
  using Orders = std::map<std::string, std::vector<uint32_t>>;
  const Orders& orders(bool pack) const { return pack ? pack_orders_ : unpack_orders_; }

  const std::vector<gpu::PanelEntry>& entries() const { return entries_; }
  const std::vector<gpu::PanelChunk>& chunks() const { return chunks_; }
  const std::vector<gpu::PanelView>& views() const { return views_; }
  const std::vector<gpu::PanelKind>& kinds() const { return kinds_; }
  const std::vector<uint64_t>& codes() const { return codes_; }
  const std::vector<uint32_t>& blocks() const;
  const std::vector<std::byte>& header() const;

  // All fields that are no addresses; `count` and what depends on the launch is left to the caller.
  gpu::PanelLaunch launch() const;

 private:
  struct Panel {
    uint32_t view = 0, head = 0, first_token = 0, rows = 0;
    uint16_t kind = 0;
    uint64_t bytes = 0;
  };
  Panel panel(uint32_t index) const;
  std::string kernel_of(const gpu::PanelKind& kind, size_t view, bool pack) const;

  const PanelPlan& plan_;
  std::vector<gpu::PanelView> views_;
  std::vector<gpu::PanelKind> kinds_;  // of each plane: coded, then raw
  std::map<const CodeTable*, uint32_t> codes_of_;
  std::vector<uint64_t> codes_;
  // By view and kind, for views_[i] and kinds_[2 * plane] or the next: which kernel.
  std::vector<std::string> pack_kernels_, unpack_kernels_;
  std::vector<gpu::PanelEntry> entries_;
  std::vector<gpu::PanelChunk> chunks_;
  Orders pack_orders_, unpack_orders_;
};

}  // namespace kvxfer

#endif  // KVXFER_PACK_GPU_PANEL_TABLE_H_
