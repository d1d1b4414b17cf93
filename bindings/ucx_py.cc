#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvxfer/agent.h"
#include "kvxfer/ucx.h"
#include "register.h"

namespace py = pybind11;

namespace kvxfer::bindings {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// UCX as one agent uses it, which outlives this.
class Ucx {
 public:
  // `timeout`: seconds that a producer waits for its consumer.
  Ucx(Agent& agent, const std::vector<std::string>& libraries, bool rdma_only, double timeout)
      : agent_(agent), fabric_(agent.io(), {libraries, rdma_only}), timeout_(timeout) {}

  double timeout() const { return timeout_; }

  Agent& agent() const { return agent_; }

  // A side of a connection. The arena is registered for each peer, what we send from once.
  UcxEndpoint endpoint(bool with_arena) {
    if (with_arena) {
      const AgentMemory arena = agent_.arena();
      return {fabric_, fabric_.register_memory(arena.bytes, arena.owner)};
    }
    const std::lock_guard lock(mutex_);
    if (!staging_) {
      const AgentMemory staging = agent_.staging();
      staging_ = fabric_.register_memory(staging.bytes, staging.owner);
    }
    return {fabric_, nullptr};
  }

 private:
  Agent& agent_;
  UcxFabric fabric_;
  const double timeout_;
  std::mutex mutex_;
  std::shared_ptr<UcxMemory> staging_;  // guarded by mutex_
};

class Endpoint {
 public:
  Endpoint(Ucx& ucx, bool with_arena)
      : agent_(ucx.agent()),
        timeout_(ucx.timeout()),
        endpoint_(std::make_unique<UcxEndpoint>(ucx.endpoint(with_arena))) {}

  UcxEndpoint& get() const {
    if (!endpoint_) throw Error(StatusCode::kInvalid, "this endpoint is closed");
    return *endpoint_;
  }

  void close() { endpoint_.reset(); }

  std::shared_ptr<Link> connect(int control_fd, const std::string& remote) {
    try {
      static_cast<void>(get());
      static_cast<void>(agent_.io());  // throws when the agent is closed
    } catch (...) {
      if (control_fd >= 0) ::close(control_fd);
      throw;
    }
    return endpoint_->connect(control_fd, std::as_bytes(std::span(remote)), timeout_);
  }

 private:
  Agent& agent_;
  const double timeout_;
  std::unique_ptr<UcxEndpoint> endpoint_;
};

// What ends by waiting for threads that may wait for the GIL.
template <typename T>
struct DeleteWithoutGil {
  void operator()(T* object) const {
    const py::gil_scoped_release release;
    delete object;
  }
};

}  // namespace

void register_ucx(py::module_& module) {
  py::class_<UcxInfo>(module, "UcxInfo")
      .def_readonly("path", &UcxInfo::path)
      .def_readonly("version", &UcxInfo::version)
      .def_readonly("resources", &UcxInfo::resources)
      .def_readonly("rdma", &UcxInfo::rdma);

  module.def(
      "ucx_info",
      [](const std::vector<std::string>& libraries) {
        return describe_ucx({.libraries = libraries});
      },
      py::arg("libraries"), NoGil());

  py::class_<Endpoint, std::unique_ptr<Endpoint, DeleteWithoutGil<Endpoint>>>(module, "UcxEndpoint")
      .def_property_readonly("address",
                             [](const Endpoint& endpoint) {
                               const auto& bytes = endpoint.get().address();
                               return py::bytes(std::string(
                                   reinterpret_cast<const char*>(bytes.data()), bytes.size()));
                             })
      .def_property_readonly("lanes",
                             [](const Endpoint& endpoint) { return endpoint.get().lanes(); })
      .def_property_readonly("rdma", [](const Endpoint& endpoint) { return endpoint.get().rdma(); })
      .def(
          "connect",
          [](Endpoint& endpoint, int control_fd, const py::bytes& remote) {
            const std::string text = remote;
            const py::gil_scoped_release release;
            return endpoint.connect(control_fd, text);
          },
          py::kw_only(), py::arg("control_fd"), py::arg("remote"))
      .def("close", &Endpoint::close, NoGil());

  py::class_<Ucx, std::unique_ptr<Ucx, DeleteWithoutGil<Ucx>>>(module, "Ucx")
      .def(py::init<Agent&, const std::vector<std::string>&, bool, double>(), py::arg("agent"),
           py::arg("libraries"), py::arg("rdma_only"), py::arg("timeout"), py::keep_alive<1, 2>(),
           NoGil())
      .def(
          "endpoint",
          [](Ucx& ucx, bool with_arena) {
            const py::gil_scoped_release release;
            return std::unique_ptr<Endpoint, DeleteWithoutGil<Endpoint>>(
                new Endpoint(ucx, with_arena));
          },
          py::arg("with_arena"), py::keep_alive<0, 1>());
}

}  // namespace kvxfer::bindings
