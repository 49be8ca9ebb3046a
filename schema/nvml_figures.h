#pragma once
// One GPU of a lease as NVML describes it: what a server sends to the lease's holder, and the holder passes
// on to our libnvidia-ml.so.1 (client/nvml). A flat struct in host byte order, as the greeting of a session
// (schema/hello.h); client and server of different builds refuse each other. `size` and `layout` are checked
// by who reads it (readable()).
//
// Each figure stands with NVML's own answer to the question for it: what the GPU or its driver does not tell
// is NVML_ERROR_NOT_SUPPORTED here as natively.

#include <nvml.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "schema/names.h"

namespace gpupool::schema {

template <class T>
struct Said {
  nvmlReturn_t status = NVML_ERROR_NOT_SUPPORTED;
  T value{};
};
template <class T>
struct Two {
  T first{}, second{};
};
struct NvmlText {
  char text[96] = {};
};

inline constexpr int kFigureDevices = 8;     // of one lease: hello.h's kMaxDevices
inline constexpr int kFigureProcesses = 64;  // sessions of one lease on one server
inline constexpr int kFigureP2P = NVML_P2P_CAPS_INDEX_UNKNOWN;
// What nvmlDeviceGetFieldValues answers; scope: as in nvmlFieldValue_t, a link's number for those of links.
// From compute capability 9.0 on NCCL asks a link's state in this way, and takes GPUs without links that are
// up for unconnected.
struct NvmlField {
  unsigned id = 0, scope = 0;
};
inline constexpr NvmlField kUnscopedFields[] = {
    {NVML_FI_DEV_ECC_CURRENT},          {NVML_FI_DEV_ECC_PENDING},
    {NVML_FI_DEV_ECC_SBE_VOL_TOTAL},    {NVML_FI_DEV_ECC_DBE_VOL_TOTAL},
    {NVML_FI_DEV_ECC_SBE_AGG_TOTAL},    {NVML_FI_DEV_ECC_DBE_AGG_TOTAL},
    {NVML_FI_DEV_MEMORY_TEMP},          {NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION},
    {NVML_FI_DEV_NVLINK_SPEED_MBPS_L0}, {NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON},
    {NVML_FI_DEV_NVLINK_LINK_COUNT},    {NVML_FI_DEV_PCIE_REPLAY_COUNTER},
    {NVML_FI_DEV_C2C_LINK_COUNT},       {NVML_FI_DEV_POWER_AVERAGE},
    {NVML_FI_DEV_POWER_INSTANT},        {NVML_FI_DEV_POWER_MIN_LIMIT},
    {NVML_FI_DEV_POWER_MAX_LIMIT},      {NVML_FI_DEV_POWER_DEFAULT_LIMIT},
    {NVML_FI_DEV_POWER_CURRENT_LIMIT},  {NVML_FI_DEV_POWER_REQUESTED_LIMIT},
};
inline constexpr unsigned kLinkFieldIds[] = {NVML_FI_DEV_NVLINK_GET_STATE, NVML_FI_DEV_NVLINK_GET_SPEED};
inline constexpr auto kNvmlFields = [] {
  std::array<NvmlField, std::size(kUnscopedFields) + std::size(kLinkFieldIds) * NVML_NVLINK_MAX_LINKS> all{};
  auto* next = std::copy(std::begin(kUnscopedFields), std::end(kUnscopedFields), all.data());
  for (const unsigned id : kLinkFieldIds)
    for (unsigned link = 0; link < NVML_NVLINK_MAX_LINKS; ++link) *next++ = {id, link};
  return all;
}();
inline constexpr int kFields = static_cast<int>(kNvmlFields.size());

struct FigureProcess {
  uint32_t pid = 0;  // as its own machine counts
  uint32_t reserved = 0;
  uint64_t usedBytes = 0;
};

// What lies between two GPUs.
struct FigurePair {
  Said<nvmlGpuP2PStatus_t> p2p[kFigureP2P];
  Said<nvmlGpuTopologyLevel_t> ancestor;
  Said<int> sameBoard;
};

struct NvmlFigures {
  uint32_t size = 0;
  uint32_t layout = 0;
  // Of the server.
  Said<NvmlText> driverVersion, nvmlVersion;
  Said<int> cudaVersion;
  // From its inventory: there whether it has NVML or not.
  char uuid[48] = {};      // "GPU-..."
  nvmlPciInfo_t pci = {};  // in the pool's own domains (schema/pci_bus_id.h)
  Said<Two<int>> capability;
  // What the lease may use: its own share if it has a limit, else the GPU's.
  Said<nvmlMemory_t> memory;
  Said<nvmlMemory_v2_t> memoryV2;
  // Of the lease, on this GPU.
  uint32_t processCount = 0;
  uint32_t deviceCount = 0;  // of the lease
  FigureProcess processes[kFigureProcesses];
  // To each GPU of the lease, in its order.
  FigurePair pairs[kFigureDevices];
  nvmlFieldValue_t fields[kFields] = {};

#define FIGURE(when, function, type, member) Said<type> member;
#define FIGURE_PAIR(when, function, type, member) Said<Two<type>> member;
#define FIGURE_BY(when, function, argument, count, type, member) Said<type> member[count];
#define FIGURE_BY_TWO(when, function, argument, count, second, seconds, type, member) \
  Said<type> member[count][seconds];
#define FIGURE_TEXT(function, member) Said<NvmlText> member;
#include "schema/nvml_figures.def"
#undef FIGURE
#undef FIGURE_PAIR
#undef FIGURE_BY
#undef FIGURE_BY_TWO
#undef FIGURE_TEXT
};
static_assert(std::is_trivially_copyable_v<NvmlFigures>);
inline constexpr size_t kMostFigureBytes = size_t{32} * 1024;  // of one GPU, for those who only pass it on
static_assert(sizeof(NvmlFigures) <= kMostFigureBytes);

// Names the members and their sizes.
inline constexpr uint32_t kFiguresLayout = fnv32(
#define FIGURE(when, function, type, member) #type #member
#define FIGURE_PAIR(when, function, type, member) "2" #type #member
#define FIGURE_BY(when, function, argument, count, type, member) #count #type #member
#define FIGURE_BY_TWO(when, function, argument, count, second, seconds, type, member) \
  #count #seconds #type #member
#define FIGURE_TEXT(function, member) "t" #member
#include "schema/nvml_figures.def"
#undef FIGURE
#undef FIGURE_PAIR
#undef FIGURE_BY
#undef FIGURE_BY_TWO
#undef FIGURE_TEXT
);

inline NvmlFigures emptyFigures() {
  NvmlFigures figures;
  figures.size = sizeof figures;
  figures.layout = kFiguresLayout;
  for (int i = 0; i < kFields; ++i) {
    figures.fields[i].fieldId = kNvmlFields[i].id;
    figures.fields[i].scopeId = kNvmlFields[i].scope;
    figures.fields[i].nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
  }
  return figures;
}

// The server's answer, or null: it is not asked for that.
inline const nvmlFieldValue_t* findField(const NvmlFigures& figures, unsigned id, unsigned scope) {
  const auto* end = std::end(figures.fields);
  const auto* found = std::find_if(std::begin(figures.fields), end, [&](const nvmlFieldValue_t& one) {
    return one.fieldId == id && one.scopeId == scope;
  });
  return found == end ? nullptr : found;
}

// False: these bytes are not what this build means by it. What is read has ends to its texts, and counts that
// hold.
inline bool readFigures(std::span<const std::byte> bytes, NvmlFigures& out) {
  if (bytes.size() != sizeof out) return false;
  std::memcpy(&out, bytes.data(), sizeof out);
  const auto end = [](auto& text) { text[sizeof text - 1] = 0; };
  for (NvmlText* text : {&out.driverVersion.value, &out.nvmlVersion.value}) end(text->text);
  end(out.uuid);
  end(out.pci.busId);
  end(out.pci.busIdLegacy);
#define FIGURE(when, function, type, member)
#define FIGURE_PAIR(when, function, type, member)
#define FIGURE_BY(when, function, argument, count, type, member)
#define FIGURE_BY_TWO(when, function, argument, count, second, seconds, type, member)
#define FIGURE_TEXT(function, member) end(out.member.value.text);
#include "schema/nvml_figures.def"
#undef FIGURE
#undef FIGURE_PAIR
#undef FIGURE_BY
#undef FIGURE_BY_TWO
#undef FIGURE_TEXT
  for (auto& peer : out.linkPeers) {
    end(peer.value.busId);
    end(peer.value.busIdLegacy);
  }
  return out.size == sizeof out && out.layout == kFiguresLayout && out.processCount <= kFigureProcesses &&
         out.deviceCount <= kFigureDevices;
}

}  // namespace gpupool::schema
