#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvxfer/status.h"
#include "register.h"

namespace py = pybind11;

namespace kvxfer::bindings {
namespace {

// The binary interface of DLPack, both the form before 1.0 and the versioned one.
struct DlTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t type_code;
  uint8_t type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;  // in elements; null when compact and row-major
  uint64_t byte_offset;
};

struct DlManaged {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManaged*);
};

struct DlManagedVersioned {
  uint32_t major;
  uint32_t minor;
  void* context;
  void (*deleter)(DlManagedVersioned*);
  uint64_t flags;
  DlTensor tensor;
};

constexpr uint64_t kReadOnly = 1;
constexpr uint32_t kMajor = 1;

std::string type_name(const DlTensor& tensor) {
  const std::string bits = std::to_string(tensor.type_bits);
  std::string name;
  switch (tensor.type_code) {
    case 0: name = "int" + bits; break;
    case 1: name = "uint" + bits; break;
    case 2: name = "float" + bits; break;
    case 4: name = "bfloat" + bits; break;
    case 6: name = "bool"; break;
    case 10: name = "float8_e4m3fn"; break;
    case 11: name = "float8_e4m3fnuz"; break;
    case 12: name = "float8_e5m2"; break;
    case 13: name = "float8_e5m2fnuz"; break;
    default: name = "DLPack type " + std::to_string(tensor.type_code) + " of " + bits + " bits";
  }
  return tensor.type_lanes == 1 ? name : name + "x" + std::to_string(tensor.type_lanes);
}

// A tensor taken over from a DLPack capsule. Gives it back to its library when it dies, which has
// to be with the GIL held: the deleter is often Python's.
class DlpackTensor {
 public:
  explicit DlpackTensor(const py::capsule& capsule) {
    const char* name = PyCapsule_GetName(capsule.ptr());
    if (name != nullptr && std::strcmp(name, "dltensor_versioned") == 0) {
      auto* managed = static_cast<DlManagedVersioned*>(capsule.get_pointer());
      if (managed->major != kMajor) {
        throw Error(StatusCode::kInvalid, "the tensor comes as DLPack " +
                                              std::to_string(managed->major) +
                                              "; only version 1 and the one before are known");
      }
      read_only_ = (managed->flags & kReadOnly) != 0;
      tensor_ = &managed->tensor;
      owner_ = own(managed);
    } else if (name != nullptr && std::strcmp(name, "dltensor") == 0) {
      auto* managed = static_cast<DlManaged*>(capsule.get_pointer());
      tensor_ = &managed->tensor;
      owner_ = own(managed);
    } else {
      throw Error(StatusCode::kInvalid,
                  std::string("expected a DLPack capsule that nobody has used yet, found \"") +
                      (name == nullptr ? "" : name) + '"');
    }
    const bool versioned = name[std::strlen("dltensor")] != '\0';
    PyCapsule_SetName(capsule.ptr(), versioned ? "used_dltensor_versioned" : "used_dltensor");
  }

  uintptr_t address() const {
    return reinterpret_cast<uintptr_t>(tensor_->data) + tensor_->byte_offset;
  }
  std::string dtype() const { return type_name(*tensor_); }
  int64_t itemsize() const { return (tensor_->type_bits * tensor_->type_lanes + 7) / 8; }
  bool read_only() const { return read_only_; }
  std::pair<int32_t, int32_t> device() const { return {tensor_->device_type, tensor_->device_id}; }
  std::vector<int64_t> shape() const { return {tensor_->shape, tensor_->shape + tensor_->ndim}; }

  std::vector<int64_t> strides() const {
    const int64_t element = itemsize();
    std::vector<int64_t> strides(static_cast<size_t>(tensor_->ndim));
    int64_t compact = element;
    for (size_t i = strides.size(); i-- > 0;) {
      strides[i] = tensor_->strides != nullptr ? tensor_->strides[i] * element : compact;
      compact *= tensor_->shape[i];
    }
    return strides;
  }

 private:
  template <class Managed>
  static std::shared_ptr<void> own(Managed* managed) {
    return {managed, [](void* pointer) {
              auto* owned = static_cast<Managed*>(pointer);
              if (owned->deleter != nullptr) owned->deleter(owned);
            }};
  }

  std::shared_ptr<void> owner_;
  const DlTensor* tensor_ = nullptr;
  bool read_only_ = false;
};

}  // namespace

void register_dlpack(py::module_& module) {
  py::class_<DlpackTensor>(module, "DlpackTensor", "A tensor taken over from a DLPack capsule.")
      .def(py::init<const py::capsule&>(), py::arg("capsule"))
      .def_property_readonly("address", &DlpackTensor::address)
      .def_property_readonly("dtype", &DlpackTensor::dtype)
      .def_property_readonly("itemsize", &DlpackTensor::itemsize)
      .def_property_readonly("read_only", &DlpackTensor::read_only)
      .def_property_readonly("device", &DlpackTensor::device)
      .def_property_readonly("shape", &DlpackTensor::shape)
      .def_property_readonly("strides", &DlpackTensor::strides, "In bytes.");
}

}  // namespace kvxfer::bindings
