#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "kvxfer/copy_plan.h"
#include "kvxfer/layout.h"
#include "kvxfer/status.h"
#include "register.h"

namespace py = pybind11;

namespace kvxfer::bindings {
namespace {

// [block, kv head, token, content] strides behind the address, in bytes.
using ViewTuple = std::tuple<uintptr_t, int64_t, int64_t, int64_t, int64_t>;
using RunTuple = std::tuple<uintptr_t, uint64_t, uint64_t, int64_t>;

// Letters of the axes, in the order of enum Axis.
constexpr std::string_view kLetters = "LPTHN";

std::string order_text(const WireOrder& order) {
  std::string text;
  for (const Axis axis : order) text += kLetters[static_cast<size_t>(axis)];
  return text;
}

WireOrder order_from_text(const std::string& text) {
  WireOrder order;
  bool known = text.size() == order.size();
  for (size_t i = 0; known && i < order.size(); ++i) {
    const size_t index = kLetters.find(text[i]);
    known = index != std::string_view::npos;
    if (known) order[i] = static_cast<Axis>(index);
  }
  if (!known) {
    throw Error(StatusCode::kInvalid, "wire order \"" + text +
                                          "\" is not five of the letters L (layer), P (plane), "
                                          "T (tile), H (kv head), N (token)");
  }
  return order;
}

CacheLayout make_layout(uint32_t num_blocks, uint32_t block_size, uint32_t num_heads,
                        std::vector<std::string> layers,
                        const std::vector<std::tuple<std::string, uint32_t>>& planes,
                        const std::vector<ViewTuple>& views, const std::string& element,
                        uint32_t first_head, std::string model, std::vector<float> scales) {
  CacheLayout layout;
  layout.model = std::move(model);
  layout.element = element_from_name(element);
  layout.num_blocks = num_blocks;
  layout.block_size = block_size;
  layout.num_heads = num_heads;
  layout.first_head = first_head;
  layout.layers = std::move(layers);
  for (const auto& [name, content] : planes) layout.planes.push_back({name, content});
  for (const auto& [address, block, head, token, content] : views) {
    layout.views.push_back({reinterpret_cast<std::byte*>(address), block, head, token, content});
  }
  layout.scales = std::move(scales);
  return layout;
}

py::list planes_of(const CacheLayout& layout) {
  py::list planes;
  for (const PlaneSpec& plane : layout.planes)
    planes.append(py::make_tuple(plane.name, plane.content));
  return planes;
}

std::vector<ViewTuple> views_of(const CacheLayout& layout) {
  std::vector<ViewTuple> views;
  for (const PlaneView& view : layout.views) {
    views.emplace_back(reinterpret_cast<uintptr_t>(view.data), view.block_stride, view.head_stride,
                       view.token_stride, view.content_stride);
  }
  return views;
}

std::vector<RunTuple> run_tuples(const std::vector<Run>& runs) {
  std::vector<RunTuple> tuples;
  for (const Run& run : runs) {
    tuples.emplace_back(reinterpret_cast<uintptr_t>(run.address), run.bytes, run.count, run.stride);
  }
  return tuples;
}

void register_cache_layout(py::module_& module) {
  py::class_<CacheLayout>(module, "CacheLayout",
                          "Where an engine's paged KV memory lies. It does not keep that alive.")
      .def(py::init(&make_layout), py::kw_only(), py::arg("num_blocks"), py::arg("block_size"),
           py::arg("num_heads"), py::arg("layers"), py::arg("planes"), py::arg("views"),
           py::arg("element") = "bfloat16", py::arg("first_head") = 0, py::arg("model") = "",
           py::arg("scales") = std::vector<float>())
      .def_readonly("model", &CacheLayout::model)
      .def_property_readonly("element",
                             [](const CacheLayout& layout) { return element_name(layout.element); })
      .def_readonly("num_blocks", &CacheLayout::num_blocks)
      .def_readonly("block_size", &CacheLayout::block_size)
      .def_readonly("num_heads", &CacheLayout::num_heads)
      .def_readonly("first_head", &CacheLayout::first_head)
      .def_property_readonly("layers", [](const CacheLayout& layout) { return layout.layers; })
      .def_property_readonly("planes", &planes_of)
      .def_property_readonly("views", &views_of)
      .def_property_readonly("scales", [](const CacheLayout& layout) { return layout.scales; })
      .def("token_bytes", &CacheLayout::token_bytes)
      .def("validate", &CacheLayout::validate);
}

[[noreturn]] void refuse_block(const std::string& value) {
  throw Error(StatusCode::kInvalid, "block ids are integers of 0 to 2^32 - 1, not " + value);
}

template <class T>
void append_ids(const py::buffer_info& info, std::vector<uint32_t>& blocks) {
  const auto* at = static_cast<const char*>(info.ptr);
  for (py::ssize_t i = 0; i < info.size; ++i, at += info.strides[0]) {
    const T id = *reinterpret_cast<const T*>(at);
    if (std::cmp_less(id, 0) || std::cmp_greater(id, UINT32_MAX)) refuse_block(std::to_string(id));
    blocks.push_back(static_cast<uint32_t>(id));
  }
}

// Block ids out of an integer array (numpy, array.array: at memory speed) or any iterable.
std::vector<uint32_t> to_blocks(const py::object& ids) {
  std::vector<uint32_t> blocks;
  if (py::isinstance<py::buffer>(ids)) {
    const py::buffer_info info = py::reinterpret_borrow<py::buffer>(ids).request();
    if (info.ndim != 1) refuse_block("an array of " + std::to_string(info.ndim) + " axes");
    blocks.reserve(static_cast<size_t>(info.size));
    if (info.item_type_is_equivalent_to<int64_t>())
      return append_ids<int64_t>(info, blocks), blocks;
    if (info.item_type_is_equivalent_to<int32_t>())
      return append_ids<int32_t>(info, blocks), blocks;
    if (info.item_type_is_equivalent_to<uint32_t>())
      return append_ids<uint32_t>(info, blocks), blocks;
    if (info.item_type_is_equivalent_to<uint64_t>())
      return append_ids<uint64_t>(info, blocks), blocks;
  }
  for (const py::handle id : ids) {
    try {
      blocks.push_back(id.cast<uint32_t>());
    } catch (const py::cast_error&) {
      refuse_block(py::str(py::repr(id)));
    }
  }
  return blocks;
}

void register_copy_plan(py::module_& module) {
  py::class_<BlockTable>(module, "BlockTable", "Where a request's tokens lie in one side's cache.")
      .def(py::init([](const py::object& blocks, uint32_t first_token, uint32_t first_slot) {
             return BlockTable{to_blocks(blocks), first_token, first_slot};
           }),
           py::arg("blocks"), py::arg("first_token") = 0, py::arg("first_slot") = 0)
      .def_property_readonly("blocks", [](const BlockTable& table) { return table.blocks; })
      .def_readonly("first_token", &BlockTable::first_token)
      .def_readonly("first_slot", &BlockTable::first_slot)
      .def("validate", &BlockTable::validate, py::arg("layout"), py::arg("begin"), py::arg("end"),
           py::arg("unique"));

  py::class_<Slice>(module, "Slice", "Layers x kv heads x tokens that a fetch asks for.")
      .def(py::init([](std::vector<uint32_t> layers, uint32_t head_begin, uint32_t head_end,
                       uint32_t token_begin, uint32_t token_end) {
             return Slice{std::move(layers), head_begin, head_end, token_begin, token_end};
           }),
           py::arg("layers"), py::arg("head_begin"), py::arg("head_end"), py::arg("token_begin"),
           py::arg("token_end"))
      .def_property_readonly("layers", [](const Slice& slice) { return slice.layers; })
      .def_readonly("head_begin", &Slice::head_begin)
      .def_readonly("head_end", &Slice::head_end)
      .def_readonly("token_begin", &Slice::token_begin)
      .def_readonly("token_end", &Slice::token_end);

  py::class_<CopyPlan>(module, "CopyPlan", "Maps bytes of the wire to one side's memory.")
      .def(py::init([](const CacheLayout& layout, const BlockTable& table, const Slice& slice,
                       std::vector<uint32_t> ends, const std::string& order,
                       std::vector<uint32_t> plane_of) {
             return CopyPlan(layout, table, slice, std::move(ends), order_from_text(order),
                             std::move(plane_of));
           }),
           py::arg("layout"), py::arg("table"), py::arg("slice"), py::arg("tile_ends"),
           py::arg("order"), py::arg("plane_of"))
      .def("wire_bytes", &CopyPlan::wire_bytes)
      .def("row_floor", &CopyPlan::row_floor, py::arg("offset"))
      .def("layers_of", &CopyPlan::layers_of, py::arg("begin"), py::arg("end"))
      .def(
          "runs",
          [](const CopyPlan& plan, uint64_t begin, uint64_t end) {
            std::vector<Run> runs;
            plan.append_runs(begin, end, runs);
            return run_tuples(runs);
          },
          py::arg("begin"), py::arg("end"))
      .def("tail_runs", [](const CopyPlan& plan) {
        std::vector<Run> runs;
        plan.append_tail_runs(runs);
        return run_tuples(runs);
      });
}

}  // namespace

void register_layout(py::module_& module) {
  register_cache_layout(module);
  register_copy_plan(module);
  module.def(
      "element_bytes",
      [](const std::string& name) { return element_bytes(element_from_name(name)); },
      py::arg("name"));
  module.def("tile_ends", &tile_ends, py::arg("begin"), py::arg("end"),
             py::arg("producer_block_size"), py::arg("producer_slot"),
             py::arg("consumer_block_size"), py::arg("consumer_slot"));
  module.def(
      "choose_wire_order",
      [](const CacheLayout& producer, const CacheLayout& consumer, bool layer_first) {
        return order_text(choose_wire_order(producer, consumer, layer_first));
      },
      py::arg("producer"), py::arg("consumer"), py::arg("layer_first") = false);
}

}  // namespace kvxfer::bindings
