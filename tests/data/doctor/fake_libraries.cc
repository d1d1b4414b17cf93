// Drivers' libraries of a host with two adapters, a GPU of each vendor and UCX: what the doctor
// asks of them, and nothing else. The structures are those that the transport uses.
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "transport/verbs/abi.h"

using kvxfer::ibv::DeviceAttr;
using kvxfer::ibv::PortAttr;

namespace {
int devices[2];
void* list[3] = {&devices[0], &devices[1], nullptr};
}  // namespace

extern "C" {

void** ibv_get_device_list(int* count) {
  *count = 2;
  return list;
}
void ibv_free_device_list(void**) {}
const char* ibv_get_device_name(void* device) { return device == list[0] ? "fake_0" : "fake_1"; }
void* ibv_open_device(void* device) { return device == list[0] ? device : nullptr; }
int ibv_close_device(void*) { return 0; }
void ibv_reg_dmabuf_mr() {}

int ibv_query_device(void*, DeviceAttr* attr) {
  *attr = {};
  std::strcpy(attr->fw_ver, "1.2.3");
  attr->max_mr_size = 1ull << 40;
  attr->max_qp = 11;
  attr->max_qp_wr = 12;
  attr->max_sge = 13;
  attr->max_srq = 14;
  attr->max_srq_wr = 15;
  return 0;
}

int ibv_query_port(void*, uint8_t port, PortAttr* attr) {
  *attr = {};
  attr->active_mtu = port == 1 ? 5 : 1;
  attr->max_msg_sz = 1u << 30;
  return 0;
}

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { return *version = 12080, 0; }
int cuDeviceGetCount(int* count) { return *count = 1, 0; }
int cuDeviceGet(int* device, int index) { return *device = 70 + index, 0; }
int cuDeviceGetName(char* name, int, int device) {
  return std::strcpy(name, device == 70 ? "Fake H100" : "?"), 0;
}
int cuDeviceGetPCIBusId(char* id, int, int) { return std::strcpy(id, "0000:0A:00.0"), 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = 80ull << 30, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? 9 : attribute == 124 ? 1 : 0;
  return 0;
}

int hipRuntimeGetVersion(int* version) { return *version = 70100000, 0; }
int hipGetDeviceCount(int* count) { return *count = 1, 0; }
int hipDeviceGetName(char* name, int, int) { return std::strcpy(name, "Fake MI300X"), 0; }
int hipDeviceGetPCIBusId(char* id, int, int) { return std::strcpy(id, "0000:0B:00.0"), 0; }
void hsa_amd_portable_export_dmabuf() {}

}  // extern "C"
