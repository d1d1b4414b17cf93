#ifndef KVXFER_DEVICE_KERNEL_HIP_H_
#define KVXFER_DEVICE_KERNEL_HIP_H_

#include <cstdint>

#define KVXFER_DEVICE __attribute__((device, always_inline)) inline
#define KVXFER_KERNEL(threads) \
  __attribute__((global, amdgpu_flat_work_group_size(threads, threads))) void
#define KVXFER_SHARED __attribute__((shared))
#define KVXFER_UNROLL _Pragma("unroll")

namespace kvxfer::gpu {

constexpr uint32_t kWave = 64;

KVXFER_DEVICE uint32_t thread_id() { return __builtin_amdgcn_workitem_id_x(); }
KVXFER_DEVICE uint32_t group_x() { return __builtin_amdgcn_workgroup_id_x(); }
KVXFER_DEVICE uint32_t group_y() { return __builtin_amdgcn_workgroup_id_y(); }

KVXFER_DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

KVXFER_DEVICE uint32_t shuffle_xor(uint32_t value, uint32_t mask) {
  const uint32_t lane = thread_id() & (kWave - 1);
  return static_cast<uint32_t>(
      __builtin_amdgcn_ds_bpermute(static_cast<int>((lane ^ mask) * 4), static_cast<int>(value)));
}

KVXFER_DEVICE void add_global(uint64_t* to, uint64_t value) {
  __hip_atomic_fetch_add(to, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
KVXFER_DEVICE void add_global(uint32_t* to, uint32_t value) {
  __hip_atomic_fetch_add(to, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
KVXFER_DEVICE void add_shared(uint32_t* to, uint32_t value) {
  __hip_atomic_fetch_add(to, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
KVXFER_DEVICE void or_shared(uint32_t* to, uint32_t value) {
  __hip_atomic_fetch_or(to, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}

// Addresses that come out of tables point anywhere as far as the compiler knows, and would be
// accessed by the slower flat_* instructions, which also wait for shared memory.
template <class T>
using Global = __attribute__((address_space(1))) T;

typedef uint32_t HipVec2 __attribute__((ext_vector_type(2)));
typedef uint32_t HipVec4 __attribute__((ext_vector_type(4)));

template <class T>
KVXFER_DEVICE T load(const void* from) {
  if constexpr (sizeof(T) == 16) {
    const HipVec4 v = *reinterpret_cast<const Global<HipVec4>*>(reinterpret_cast<uintptr_t>(from));
    return T{{v.x, v.y, v.z, v.w}};
  } else if constexpr (sizeof(T) == 8 && alignof(T) == 8 && !__is_integral(T)) {
    const HipVec2 v = *reinterpret_cast<const Global<HipVec2>*>(reinterpret_cast<uintptr_t>(from));
    return T{{v.x, v.y}};
  } else {
    return *reinterpret_cast<const Global<T>*>(reinterpret_cast<uintptr_t>(from));
  }
}
template <class T>
KVXFER_DEVICE void store(void* to, T value) {
  if constexpr (sizeof(T) == 16) {
    const HipVec4 v = {value.word[0], value.word[1], value.word[2], value.word[3]};
    *reinterpret_cast<Global<HipVec4>*>(reinterpret_cast<uintptr_t>(to)) = v;
  } else if constexpr (sizeof(T) == 8 && !__is_integral(T)) {
    const HipVec2 v = {value.word[0], value.word[1]};
    *reinterpret_cast<Global<HipVec2>*>(reinterpret_cast<uintptr_t>(to)) = v;
  } else {
    *reinterpret_cast<Global<T>*>(reinterpret_cast<uintptr_t>(to)) = value;
  }
}

template <class T>
KVXFER_DEVICE T load_once(const void* from) {
  if constexpr (sizeof(T) == 16) {
    const HipVec4 v = __builtin_nontemporal_load(
        reinterpret_cast<const Global<HipVec4>*>(reinterpret_cast<uintptr_t>(from)));
    return T{{v.x, v.y, v.z, v.w}};
  } else {
    return load<T>(from);
  }
}
template <class T>
KVXFER_DEVICE void store_once(void* to, T value) {
  if constexpr (sizeof(T) == 16) {
    const HipVec4 v = {value.word[0], value.word[1], value.word[2], value.word[3]};
    __builtin_nontemporal_store(
        v, reinterpret_cast<Global<HipVec4>*>(reinterpret_cast<uintptr_t>(to)));
  } else {
    store<T>(to, value);
  }
}

KVXFER_DEVICE uint32_t float_bits(float value) { return __builtin_bit_cast(uint32_t, value); }
KVXFER_DEVICE float bits_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }

KVXFER_DEVICE float half_float(uint32_t bits) {
  return static_cast<float>(__builtin_bit_cast(_Float16, static_cast<uint16_t>(bits)));
}
KVXFER_DEVICE uint32_t float_half(float value) {
  return __builtin_bit_cast(uint16_t, static_cast<_Float16>(value));
}

KVXFER_DEVICE float clamp(float value, float largest) {
  return __builtin_amdgcn_fmed3f(value, largest, -largest);
}

typedef uint16_t HipHalves __attribute__((ext_vector_type(2)));
KVXFER_DEVICE uint32_t max_halves(uint32_t a, uint32_t b) {
  return __builtin_bit_cast(uint32_t, __builtin_elementwise_max(__builtin_bit_cast(HipHalves, a),
                                                                __builtin_bit_cast(HipHalves, b)));
}
KVXFER_DEVICE uint32_t round_bfloat16(float value) {
  const uint32_t bits = float_bits(value);
  return bits + 0x7fff + (bits >> 16 & 1);
}
KVXFER_DEVICE uint32_t round_bfloat16x2(float low, float high) {
  return round_bfloat16(low) >> 16 | (round_bfloat16(high) & 0xffff0000);
}

KVXFER_DEVICE int32_t round_even(float value) {
  return static_cast<int32_t>(__builtin_rintf(value));
}

// gfx942 has the fnuz dialect, in which the same byte means half as much: half the value gives the
// byte of OCP's. gfx950 has OCP's.
#if defined(__gfx942__)
constexpr float kDialect = 0.5f;
#else
constexpr float kDialect = 1.0f;
#endif

KVXFER_DEVICE float scaled(float value, float largest) { return clamp(value, largest) * kDialect; }

KVXFER_DEVICE uint32_t fp8_e4m3x4(float a, float b, float c, float d) {
  int codes = __builtin_amdgcn_cvt_pk_fp8_f32(scaled(a, 448), scaled(b, 448), 0, false);
  codes = __builtin_amdgcn_cvt_pk_fp8_f32(scaled(c, 448), scaled(d, 448), codes, true);
  return static_cast<uint32_t>(codes);
}
KVXFER_DEVICE uint32_t fp8_e5m2x4(float a, float b, float c, float d) {
  int codes = __builtin_amdgcn_cvt_pk_bf8_f32(scaled(a, 57344), scaled(b, 57344), 0, false);
  codes = __builtin_amdgcn_cvt_pk_bf8_f32(scaled(c, 57344), scaled(d, 57344), codes, true);
  return static_cast<uint32_t>(codes);
}

}  // namespace kvxfer::gpu

#include "device/kernel/soft_fp8.h"

#endif  // KVXFER_DEVICE_KERNEL_HIP_H_
