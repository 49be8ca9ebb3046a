#pragma once
// Which CUDA types are handles, and of which kind. How their values look: handle_ids.h.
// Texture and surface objects are not handles here: kernels see them (role DeviceValue).

#include <cstdint>

#include "schema/cuda.h"
#include "schema/handle_ids.h"

namespace gpupool::schema {

using HandleKind = handles::Kind;

// Objects that the driver creates implicitly (nodes of a captured graph, level arrays) are named by the
// worker, from the upper half of the index space; the client's tables never get that far.
inline constexpr uint32_t kServerIndexBit = uint32_t{1} << (handles::kIndexBits - 1);
constexpr bool mintedByServer(uint64_t handle) { return (handles::indexOf(handle) & kServerIndexBit) != 0; }

template <class T>
inline constexpr HandleKind handleKind = HandleKind::none;
template <>
inline constexpr HandleKind handleKind<CUcontext> = HandleKind::context;
template <>
inline constexpr HandleKind handleKind<CUstream> = HandleKind::stream;
template <>
inline constexpr HandleKind handleKind<CUevent> = HandleKind::event;
template <>
inline constexpr HandleKind handleKind<CUmodule> = HandleKind::module;
template <>
inline constexpr HandleKind handleKind<CUlibrary> = HandleKind::library;
template <>
inline constexpr HandleKind handleKind<CUkernel> = HandleKind::kernel;
template <>
inline constexpr HandleKind handleKind<CUfunction> = HandleKind::function;
template <>
inline constexpr HandleKind handleKind<CUgraph> = HandleKind::graph;
template <>
inline constexpr HandleKind handleKind<CUgraphNode> = HandleKind::graphNode;
template <>
inline constexpr HandleKind handleKind<CUgraphExec> = HandleKind::graphExec;
template <>
inline constexpr HandleKind handleKind<CUarray> = HandleKind::array;
template <>
inline constexpr HandleKind handleKind<CUmipmappedArray> = HandleKind::mipmap;
template <>
inline constexpr HandleKind handleKind<CUmemoryPool> = HandleKind::memPool;
template <>
inline constexpr HandleKind handleKind<CUlinkState> = HandleKind::linkState;
template <>
inline constexpr HandleKind handleKind<CUuserObject> = HandleKind::userObject;
template <>
inline constexpr HandleKind handleKind<CUgreenCtx> = HandleKind::greenContext;

template <class T>
inline constexpr bool isHandle = handleKind<T> != HandleKind::none;

template <class T>
uint64_t rawHandle(T handle) {
  static_assert(isHandle<T>);
  return reinterpret_cast<uint64_t>(handle);
}
template <class T>
T asHandle(uint64_t value) {
  static_assert(isHandle<T>);
  return reinterpret_cast<T>(value);
}

}  // namespace gpupool::schema
