#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>

#include "kvxfer/agent.h"
#include "register.h"
#include "trace_records.h"

namespace py = pybind11;

namespace kvxfer::bindings {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

Generation to_generation(const py::bytes& raw) {
  const std::string text = raw;
  Generation generation;
  if (text.size() != generation.size()) {
    throw Error(StatusCode::kInvalid,
                "a generation has 16 bytes, not " + std::to_string(text.size()));
  }
  std::memcpy(generation.data(), text.data(), generation.size());
  return generation;
}

py::bytes from_generation(const Generation& generation) {
  return py::bytes(reinterpret_cast<const char*>(generation.data()), generation.size());
}

// A peer's words may be no UTF-8.
py::str to_text(const std::string& text) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

// Asks for a status without the GIL: the agent's mutex may be held by a thread for a while.
template <class Ask>
py::tuple ask_status(Ask ask) {
  Status status;
  {
    const py::gil_scoped_release release;
    status = ask();
  }
  return py::make_tuple(status_name(status.code), to_text(status.message));
}

// An agent that nobody closed is closed when it is collected, which waits for its threads.
struct CloseWithoutGil {
  void operator()(Agent* agent) const {
    const py::gil_scoped_release release;
    delete agent;
  }
};

// The agent's threads. The descriptors that were handed over are closed when there are none any
// more.
IoThreads& threads_of(Agent& agent, std::initializer_list<std::vector<int>> descriptors) {
  try {
    return agent.io();
  } catch (...) {
    for (const auto& list : descriptors) {
      for (int fd : list) {
        if (fd >= 0) ::close(fd);
      }
    }
    throw;
  }
}

void* to_stream(uintptr_t handle) { return reinterpret_cast<void*>(handle); }

StatusCode to_code(const std::string& name) {
  for (int code = 0; code <= static_cast<int>(kLastStatus); ++code) {
    if (name == status_name(static_cast<StatusCode>(code))) return static_cast<StatusCode>(code);
  }
  throw Error(StatusCode::kInvalid, "there is no status '" + name + "'");
}

constexpr std::array<const char*, 3> kPaths = {"staged", "auto", "direct"};

Path to_path(const std::string& name) {
  const auto found = std::find(kPaths.begin(), kPaths.end(), name);
  if (found == kPaths.end()) {
    throw Error(StatusCode::kInvalid,
                "path \"" + name + "\" is not known; there are staged, auto and direct");
  }
  return static_cast<Path>(found - kPaths.begin());
}

constexpr std::array<const char*, 4> kGpuDirect = {"off", "auto", "dmabuf", "peermem"};

GpuDirect to_gpu_direct(const std::string& name) {
  const auto found = std::find(kGpuDirect.begin(), kGpuDirect.end(), name);
  if (found == kGpuDirect.end()) {
    throw Error(StatusCode::kInvalid, "gpudirect \"" + name +
                                          "\" is not known; there are auto, dmabuf, peermem and "
                                          "off");
  }
  return static_cast<GpuDirect>(found - kGpuDirect.begin());
}

ScaleFormat to_scale_format(const std::string& name) {
  for (const auto format : {ScaleFormat::kFloat32, ScaleFormat::kBFloat16, ScaleFormat::kE8M0}) {
    if (name == scale_format_name(format)) return format;
  }
  throw Error(StatusCode::kInvalid,
              "scale \"" + name + "\" is not known; there are float32, bfloat16 and e8m0");
}

CodecSpec make_codec_spec(const std::string& codec, std::optional<uint32_t> panel_tokens,
                          std::optional<uint32_t> group, const std::optional<std::string>& scale,
                          uint32_t raw_until, uint32_t raw_from) {
  CodecSpec spec;
  spec.codec = codec_from_name(codec);
  spec.panel_tokens = panel_tokens.value_or(spec.panel_tokens);
  spec.group = group.value_or(spec.group);
  if (scale) spec.scale = to_scale_format(*scale);
  spec.raw_until = raw_until;
  spec.raw_from = raw_from;
  return spec;
}

void register_options(py::module_& module) {
  py::class_<Link, std::shared_ptr<Link>>(module, "Link").def("describe", &Link::describe);

  py::class_<AgentOptions>(module, "AgentOptions")
      .def(py::init<>())
      .def_readwrite("name", &AgentOptions::name)
      .def_readwrite("incarnation", &AgentOptions::incarnation)
      .def_readwrite("arena_bytes", &AgentOptions::arena_bytes)
      .def_readwrite("slot_bytes", &AgentOptions::slot_bytes)
      .def_property(
          "path",
          [](const AgentOptions& options) { return kPaths[static_cast<size_t>(options.path)]; },
          [](AgentOptions& options, const std::string& name) { options.path = to_path(name); })
      .def_property(
          "gpudirect",
          [](const AgentOptions& options) {
            return kGpuDirect[static_cast<size_t>(options.gpu_direct)];
          },
          [](AgentOptions& options, const std::string& name) {
            options.gpu_direct = to_gpu_direct(name);
          })
      .def_readwrite("gpudirect_only", &AgentOptions::gpu_direct_only)
      .def_readwrite("window", &AgentOptions::window)
      .def_readwrite("copied_chunk_bytes", &AgentOptions::copied_chunk_bytes)
      .def_readwrite("copied_window", &AgentOptions::copied_window)
      .def_readwrite("threads", &AgentOptions::threads)
      .def_readwrite("bulk_threads", &AgentOptions::bulk_threads)
      .def_readwrite("inline_bytes", &AgentOptions::inline_bytes)
      .def_readwrite("heartbeat_interval", &AgentOptions::heartbeat_interval)
      .def_readwrite("heartbeat_timeout", &AgentOptions::heartbeat_timeout)
      .def_readwrite("peer_bytes", &AgentOptions::peer_bytes)
      .def_readwrite("digest", &AgentOptions::digest)
      .def_readwrite("lock_arena", &AgentOptions::lock_arena)
      .def_readwrite("gpu_timeout", &AgentOptions::gpu_timeout)
      .def_readwrite("gpudirect_retry", &AgentOptions::gpu_direct_retry)
      .def_readwrite("gpu_ipc", &AgentOptions::gpu_ipc);

  py::class_<LoopbackFaults>(module, "LoopbackFaults")
      .def(py::init<>())
      .def_readwrite("drop_message", &LoopbackFaults::drop_message)
      .def_readwrite("duplicate_message", &LoopbackFaults::duplicate_message)
      .def_readwrite("drop_write", &LoopbackFaults::drop_write)
      .def_readwrite("duplicate_write", &LoopbackFaults::duplicate_write)
      .def_readwrite("reorder_write", &LoopbackFaults::reorder_write)
      .def_readwrite("corrupt_write", &LoopbackFaults::corrupt_write)
      .def_readwrite("delay_us", &LoopbackFaults::delay_us)
      .def_readwrite("bytes_per_second", &LoopbackFaults::bytes_per_second)
      .def_readwrite("seed", &LoopbackFaults::seed);

  py::class_<FetchReport>(module, "FetchReport")
      .def_readonly("bytes", &FetchReport::bytes)
      .def_readonly("seconds", &FetchReport::seconds)
      .def_readonly("chunks", &FetchReport::chunks)
      .def_readonly("path", &FetchReport::path)
      .def_property_readonly("path_why",
                             [](const FetchReport& report) { return to_text(report.path_why); })
      .def_readonly("transport", &FetchReport::transport)
      .def_readonly("why", &FetchReport::why)
      .def_readonly("wire_order", &FetchReport::wire_order)
      .def_readonly("link", &FetchReport::link)
      .def_readonly("peers", &FetchReport::peers)
      .def_readonly("codec", &FetchReport::codec)
      .def_property_readonly("codec_why",
                             [](const FetchReport& report) { return to_text(report.codec_why); })
      .def_readonly("wire_bytes", &FetchReport::wire_bytes)
      .def_readonly("exceptions", &FetchReport::exceptions)
      .def_readonly("clamped", &FetchReport::clamped)
      .def_readonly("retry_after", &FetchReport::retry_after);

  py::class_<AgentStats>(module, "AgentStats")
      .def_readonly("offers", &AgentStats::offers)
      .def_readonly("serving", &AgentStats::serving)
      .def_readonly("fetches", &AgentStats::fetches)
      .def_readonly("peers", &AgentStats::peers)
      .def_readonly("slots", &AgentStats::slots)
      .def_readonly("free_slots", &AgentStats::free_slots)
      .def_readonly("quarantined_slots", &AgentStats::quarantined_slots)
      .def_readonly("held_bytes", &AgentStats::held_bytes)
      .def_readonly("bytes_sent", &AgentStats::bytes_sent)
      .def_readonly("bytes_received", &AgentStats::bytes_received)
      .def_readonly("wire_bytes_sent", &AgentStats::wire_bytes_sent)
      .def_readonly("wire_bytes_received", &AgentStats::wire_bytes_received)
      .def_readonly("digest_errors", &AgentStats::digest_errors);

  py::class_<CodecSpec>(module, "CodecSpec")
      .def(py::init(&make_codec_spec), py::kw_only(), py::arg("codec") = "raw",
           py::arg("panel_tokens") = std::nullopt, py::arg("group") = std::nullopt,
           py::arg("scale") = std::nullopt, py::arg("raw_until") = 0,
           py::arg("raw_from") = UINT32_MAX);
}

void register_handles(py::module_& module) {
  py::class_<Offer>(module, "Offer")
      .def_property_readonly("id", &Offer::id)
      .def_property_readonly("generation",
                             [](const Offer& offer) { return from_generation(offer.generation()); })
      .def_property_readonly("handle", &Offer::handle)
      .def("released", &Offer::released, NoGil())
      .def("outcome",
           [](const Offer& offer) { return ask_status([&] { return offer.outcome(); }); })
      .def(
          "mark_ready",
          [](Offer& offer, uint32_t layer, uintptr_t stream) {
            offer.mark_ready(layer, to_stream(stream));
          },
          py::arg("layer"), py::arg("stream"), NoGil())
      .def(
          "mark_all_ready",
          [](Offer& offer, uintptr_t stream) { offer.mark_all_ready(to_stream(stream)); },
          py::arg("stream"), NoGil())
      .def("release", &Offer::release, NoGil())
      .def("wait", &Offer::wait, py::arg("seconds"), NoGil())
      .def("event_fd", &Offer::event_fd, NoGil());

  py::class_<Fetch>(module, "Fetch")
      .def_property_readonly("handle", &Fetch::handle)
      .def("done", &Fetch::done, NoGil())
      .def("status", [](const Fetch& fetch) { return ask_status([&] { return fetch.status(); }); })
      .def("wait", &Fetch::wait, py::arg("seconds"), NoGil())
      .def("cancel", &Fetch::cancel, py::arg("for_good") = false, NoGil())
      .def("event_fd", &Fetch::event_fd, NoGil())
      .def("report", &Fetch::report, NoGil());
}

}  // namespace

void register_agent(py::module_& module) {
  register_options(module);
  register_handles(module);
  module.def("codec_rates_known", &codec_rates_known);
  module.def("codec_rates", [] {
    CodecRates rates;
    {
      const py::gil_scoped_release release;
      rates = codec_rates();
    }
    return std::make_tuple(rates.pack, rates.unpack, rates.encode, rates.decode);
  });
  py::class_<Agent, std::unique_ptr<Agent, CloseWithoutGil>>(module, "Agent")
      .def(py::init<const AgentOptions&>(), py::arg("options"), NoGil())
      .def("register_cache", &Agent::register_cache, py::arg("layout"), py::arg("on_gpu") = false,
           NoGil())
      .def("unregister_cache", &Agent::unregister_cache, py::arg("cache"), NoGil())
      .def("gpus", &Agent::gpus, NoGil())
      .def(
          "offer",
          [](Agent& agent, const std::string& id, const py::bytes& generation, CacheId cache,
             const BlockTable& table, uint32_t num_tokens, double lease, uint32_t consumers,
             bool ready, uintptr_t stream) {
            const OfferSpec spec{
                id,    to_generation(generation), cache, table, num_tokens, lease, consumers,
                ready, to_stream(stream)};
            py::gil_scoped_release release;
            return agent.offer(spec);
          },
          py::kw_only(), py::arg("id"), py::arg("generation"), py::arg("cache"), py::arg("table"),
          py::arg("num_tokens"), py::arg("lease"), py::arg("consumers"), py::arg("ready"),
          py::arg("stream") = 0)
      .def(
          "fetch",
          [](Agent& agent, const std::string& offer_id, const py::bytes& generation, CacheId cache,
             const BlockTable& table, uint32_t num_tokens, double timeout,
             const std::vector<
                 std::tuple<PeerId, std::vector<uint32_t>, uint32_t, uint32_t, uint32_t>>& parts,
             const CodecSpec& codec, uintptr_t stream, bool gpudirect_only) {
            FetchSpec spec{
                offer_id, to_generation(generation), cache,         table, num_tokens, timeout, {},
                codec,    to_stream(stream),         gpudirect_only};
            for (const auto& [peer, layers, begin, end, consumers] : parts)
              spec.parts.push_back({peer, layers, begin, end, consumers});
            py::gil_scoped_release release;
            return agent.fetch(spec);
          },
          py::kw_only(), py::arg("offer_id"), py::arg("generation"), py::arg("cache"),
          py::arg("table"), py::arg("num_tokens"), py::arg("timeout"), py::arg("parts"),
          py::arg("codec"), py::arg("stream") = 0, py::arg("gpudirect_only") = false)
      .def(
          "decline",
          [](Agent& agent, const std::string& offer_id, const py::bytes& generation, CacheId cache,
             double timeout, const std::vector<std::pair<PeerId, uint32_t>>& parts) {
            DeclineSpec spec{offer_id, to_generation(generation), cache, timeout, {}};
            for (const auto& [peer, consumers] : parts) spec.parts.push_back({peer, consumers});
            py::gil_scoped_release release;
            return agent.decline(spec);
          },
          py::kw_only(), py::arg("offer_id"), py::arg("generation"), py::arg("cache"),
          py::arg("timeout"), py::arg("parts"))
      .def(
          "reject",
          [](Agent& agent, const std::string& offer_id, const py::bytes& generation,
             const std::string& reason) {
            const Generation raw = to_generation(generation);
            const py::gil_scoped_release release;
            agent.reject(offer_id, raw, reason);
          },
          py::arg("offer_id"), py::arg("generation"), py::arg("reason"))
      .def(
          "renew",
          [](Agent& agent, PeerId peer, const std::string& offer_id, const py::bytes& generation) {
            const Generation raw = to_generation(generation);
            const py::gil_scoped_release release;
            agent.renew(peer, offer_id, raw);
          },
          py::arg("peer"), py::arg("offer_id"), py::arg("generation"))
      .def("add_peer", &Agent::add_peer, py::arg("name"), NoGil())
      .def(
          "attach_shm",
          [](Agent& agent, PeerId peer, int control_fd, int arena_fd, uint64_t arena_bytes,
             uint64_t incarnation, bool inbound, const std::string& why) {
            agent.attach(peer,
                         make_shm_link(threads_of(agent, {{control_fd, arena_fd}}), control_fd,
                                       arena_fd, arena_bytes),
                         incarnation, inbound, why);
          },
          py::kw_only(), py::arg("peer"), py::arg("control_fd"), py::arg("arena_fd"),
          py::arg("arena_bytes"), py::arg("incarnation"), py::arg("inbound"), py::arg("why"),
          NoGil())
      .def(
          "attach_tcp",
          [](Agent& agent, PeerId peer, int control_fd, const std::vector<int>& data_fds,
             uint64_t incarnation, bool inbound, const std::string& why) {
            agent.attach(
                peer,
                make_tcp_link(threads_of(agent, {{control_fd}, data_fds}), control_fd, data_fds),
                incarnation, inbound, why);
          },
          py::kw_only(), py::arg("peer"), py::arg("control_fd"), py::arg("data_fds"),
          py::arg("incarnation"), py::arg("inbound"), py::arg("why"), NoGil())
      .def(
          "attach",
          [](Agent& agent, PeerId peer, const std::shared_ptr<Link>& link, uint64_t incarnation,
             bool inbound,
             const std::string& why) { agent.attach(peer, link, incarnation, inbound, why); },
          py::kw_only(), py::arg("peer"), py::arg("link"), py::arg("incarnation"),
          py::arg("inbound"), py::arg("why"), NoGil())
      .def_static(
          "attach_loopback",
          [](Agent& consumer, PeerId consumer_peer, uint64_t consumer_incarnation, Agent& producer,
             PeerId producer_peer, uint64_t producer_incarnation, const LoopbackFaults& faults) {
            auto [ours, theirs] = make_loopback_pair(consumer.io(), producer.io(), faults);
            producer.attach(producer_peer, theirs, consumer_incarnation, true,
                            "within one process");
            consumer.attach(consumer_peer, ours, producer_incarnation, false, "within one process");
          },
          py::kw_only(), py::arg("consumer"), py::arg("consumer_peer"),
          py::arg("consumer_incarnation"), py::arg("producer"), py::arg("producer_peer"),
          py::arg("producer_incarnation"), py::arg("faults"), NoGil())
      .def(
          "fail_peer",
          [](Agent& agent, PeerId peer, const std::string& status, const std::string& message) {
            const Status failure{to_code(status), message};
            py::gil_scoped_release release;
            agent.fail_peer(peer, failure);
          },
          py::arg("peer"), py::arg("status"), py::arg("message"))
      .def("peer_alive", &Agent::peer_alive, py::arg("peer"), NoGil())
      .def("retire_peer", &Agent::retire_peer, py::arg("peer"), NoGil())
      .def("arena_fd", &Agent::arena_fd, NoGil())
      .def("arena_bytes", &Agent::arena_bytes, NoGil())
      .def("event_fd", &Agent::event_fd, NoGil())
      .def("poll", &Agent::poll, NoGil())
      .def("stats", &Agent::stats, NoGil())
      .def("trace", &trace_of)
      .def("metrics", &Agent::metrics, NoGil())
      .def(
          "close",
          [](Agent& agent) {
            const UnfinishedGpus unfinished = agent.close();
            return std::pair(unfinished.busy, unfinished.given_up);
          },
          NoGil());
}

}  // namespace kvxfer::bindings
