#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvxfer/agent.h"
#include "kvxfer/verbs.h"
#include "register.h"

namespace py = pybind11;

namespace kvxfer::bindings {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// The adapters as one agent uses them, which outlives this.
class Verbs {
 public:
  Verbs(Agent& agent, const VerbsOptions& options) : agent_(agent), fabric_(agent.io(), options) {}

  Agent& agent() const { return agent_; }
  std::vector<VerbsRail> rails() const { return fabric_.rails(); }

  // A side of a connection. The arena is registered for each peer, so that its keys end with it;
  // what we send from once, for nobody learns those. Connections hold it, for they outlive this.
  VerbsEndpoint endpoint(bool with_arena) {
    if (with_arena) {
      const AgentMemory arena = agent_.arena();
      return {fabric_, fabric_.register_memory(arena.bytes, VerbsAccess::kArena, arena.owner)};
    }
    const std::lock_guard lock(mutex_);
    if (!staging_) {
      const AgentMemory staging = agent_.staging();
      staging_ = fabric_.register_memory(staging.bytes, VerbsAccess::kSource, staging.owner);
    }
    return {fabric_, nullptr, staging_};
  }

 private:
  Agent& agent_;
  VerbsFabric fabric_;
  std::mutex mutex_;
  std::shared_ptr<VerbsMemory> staging_;  // guarded by mutex_
};

class Endpoint {
 public:
  Endpoint(Verbs& verbs, bool with_arena)
      : agent_(verbs.agent()), endpoint_(verbs.endpoint(with_arena)), address_(to_text()) {}

  const std::string& address() const { return address_; }

  void close() { endpoint_.reset(); }

  std::shared_ptr<Link> connect(int control_fd, const std::string& remote) {
    try {
      if (!endpoint_) throw Error(StatusCode::kInvalid, "this endpoint is connected already");
      static_cast<void>(agent_.io());  // throws when the agent is closed
    } catch (...) {
      if (control_fd >= 0) ::close(control_fd);
      throw;
    }
    VerbsEndpoint endpoint = std::move(*endpoint_);
    endpoint_.reset();
    return make_verbs_link(agent_.io(), control_fd, std::move(endpoint),
                           std::as_bytes(std::span(remote)));
  }

 private:
  std::string to_text() const {
    const auto& bytes = endpoint_->address();
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  Agent& agent_;
  std::optional<VerbsEndpoint> endpoint_;
  const std::string address_;
};

// What ends by waiting for threads that may wait for the GIL.
template <typename T>
struct DeleteWithoutGil {
  void operator()(T* object) const {
    const py::gil_scoped_release release;
    delete object;
  }
};

VerbsOptions make_options(const std::vector<std::string>& devices, int gid_index,
                          uint32_t queue_pairs, uint8_t traffic_class, const std::string& near_to,
                          const std::vector<std::string>& gpus, const std::string& sysfs) {
  VerbsOptions options;
  options.devices = devices;
  options.gid_index = gid_index;
  options.queue_pairs = queue_pairs;
  options.traffic_class = traffic_class;
  options.near_to = near_to;
  options.gpus = gpus;
  options.sysfs = sysfs;
  return options;
}

}  // namespace

void register_verbs(py::module_& module) {
  py::class_<VerbsOptions>(module, "VerbsOptions")
      .def(py::init(&make_options), py::kw_only(), py::arg("devices"), py::arg("gid_index"),
           py::arg("queue_pairs"), py::arg("traffic_class"), py::arg("near_to"), py::arg("gpus"),
           py::arg("sysfs"));

  py::class_<VerbsRail>(module, "VerbsRail")
      .def_readonly("device", &VerbsRail::device)
      .def_readonly("port", &VerbsRail::port)
      .def_readonly("active", &VerbsRail::active)
      .def_readonly("link_layer", &VerbsRail::link_layer)
      .def_readonly("gids", &VerbsRail::gids)
      .def_readonly("lid", &VerbsRail::lid)
      .def_readonly("mtu", &VerbsRail::mtu)
      .def_readonly("mbit_per_second", &VerbsRail::mbit_per_second)
      .def_readonly("pci_address", &VerbsRail::pci_address)
      .def_readonly("numa_node", &VerbsRail::numa_node);

  module.def("verbs_rails", &list_verbs_rails, py::arg("options"), NoGil());

  py::class_<Endpoint, std::unique_ptr<Endpoint, DeleteWithoutGil<Endpoint>>>(module,
                                                                              "VerbsEndpoint")
      .def_property_readonly("address",
                             [](const Endpoint& endpoint) { return py::bytes(endpoint.address()); })
      .def_property_readonly("lanes", [](const Endpoint&) { return py::list(); })
      .def_property_readonly("rdma", [](const Endpoint&) { return true; })
      .def(
          "connect",
          [](Endpoint& endpoint, int control_fd, const py::bytes& remote) {
            const std::string text = remote;
            const py::gil_scoped_release release;
            return endpoint.connect(control_fd, text);
          },
          py::kw_only(), py::arg("control_fd"), py::arg("remote"))
      .def("close", &Endpoint::close, NoGil());

  py::class_<Verbs, std::unique_ptr<Verbs, DeleteWithoutGil<Verbs>>>(module, "Verbs")
      .def(py::init<Agent&, const VerbsOptions&>(), py::arg("agent"), py::arg("options"),
           py::keep_alive<1, 2>(), NoGil())
      .def("rails", &Verbs::rails, NoGil())
      .def(
          "endpoint",
          [](Verbs& verbs, bool with_arena) {
            const py::gil_scoped_release release;
            return std::unique_ptr<Endpoint, DeleteWithoutGil<Endpoint>>(
                new Endpoint(verbs, with_arena));
          },
          py::arg("with_arena"), py::keep_alive<0, 1>());
}

}  // namespace kvxfer::bindings
