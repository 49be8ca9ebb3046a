#include "client/export_tables.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "client/contexts.h"
#include "client/lookup.h"
#include "client/process.h"
#if GPUPOOL_CUDART_SELFTEST
#include "client/selftest.h"
#endif

namespace gpupool::client {
namespace {

std::atomic<const ExportTableHooks*> currentHooks{nullptr};

const ExportTableHooks* hooks() { return currentHooks.load(std::memory_order_acquire); }

// ---- slots nobody is known to call ----

constexpr const char* kTableNames[] = {
    "CUDART_INTERFACE", "TOOLS_RT_CB_HOOKS", "TOOLS_TLS",    "CONTEXT_CHECKS",
    "INTEGRITY_CHECK",  "TOOLS_CONTEXT",     "TOOLS_MODULE", "TPC_MAP"};
enum TableName {
  cudartInterface,
  toolsHooks,
  toolsTls,
  contextChecks,
  integrityCheck,
  toolsContext,
  toolsModule,
  tpcMap
};

template <TableName table, size_t slot>
CUresult unnamed() {
  static constinit std::atomic<bool> logged{false};
  if (!logged.exchange(true)) {
    GPUPOOL_WARNING("not supported: slot %zu of the driver's private export table %s", slot,
                    kTableNames[table]);
  }
  return CUDA_ERROR_NOT_SUPPORTED;
}

// A table's first word is its size in bytes.
template <TableName table, size_t count>
struct Table {
  static constinit inline void* slots[count] = {};

  static void fill() {
    slots[0] = reinterpret_cast<void*>(sizeof slots);
    [&]<size_t... index>(std::index_sequence<index...>) {
      ((slots[index + 1] = reinterpret_cast<void*>(&unnamed<table, index + 1>)), ...);
    }(std::make_index_sequence<count - 1>{});
  }
  template <typename Function>
  static void set(size_t slot, Function* function) {
    slots[slot] = reinterpret_cast<void*>(function);
  }
};
using CudartInterface = Table<cudartInterface, 13>;
using ToolsHooks = Table<toolsHooks, 7>;
using ToolsTls = Table<toolsTls, 3>;
using ContextChecks = Table<contextChecks, 15>;
using IntegrityCheck = Table<integrityCheck, 3>;
using ToolsContext = Table<toolsContext, 93>;
using ToolsModule = Table<toolsModule, 99>;
using TpcMap = Table<tpcMap, 17>;

// ---- CUDART_INTERFACE ----

CUresult primaryHandle(CUcontext* out, CUdevice device) {
  if (const CUresult result = process::ready(); result != CUDA_SUCCESS) return result;
  return contexts().primaryHandle(out, device);
}

CUresult loadModule(CUmodule* module, const void* image) {
  if (const CUresult result = process::ready(); result != CUDA_SUCCESS) return result;
  if (module == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return hooks() == nullptr ? CUDA_ERROR_NOT_SUPPORTED : hooks()->loadModule(module, image);
}
CUresult loadWrapped(CUmodule* module, const void* wrapper, void*, void*, unsigned) {
  return loadModule(module, wrapper);
}
CUresult loadBare(const void* fatbin, CUmodule* module, void*, void*, unsigned) {
  return loadModule(module, fatbin);
}
CUresult loadCompilers() { return CUDA_SUCCESS; }  // they are the server's

// ---- TOOLS_RT_CB_HOOKS ----

// Enable flags of tool callbacks. Nobody sets them: cudart brackets every call with callbacks where one is
// not zero.
uint32_t callbackFlags[1024];
uint32_t resourceFlags[14];

void getCallbackFlags(void** flags, size_t* count) {
  *flags = callbackFlags;
  *count = std::size(callbackFlags);
}
void getResourceFlags(void** flags, size_t* count) {
  *flags = resourceFlags;
  *count = std::size(resourceFlags);
}

// ---- TOOLS_TLS, CONTEXT_CHECKS, context-local storage ----

CUresult currentForTools(CUcontext* out) {
  if (const CUresult result = process::ready(); result != CUDA_SUCCESS) return result;
  return contexts().getCurrent(out);
}

CUresult checkContext(CUcontext, uint32_t* flags, const void**) {
  if (flags != nullptr) *flags = 0;
  return CUDA_SUCCESS;
}
uint32_t checkNothing() { return 0; }

CUresult storagePut(CUcontext context, void* key, void* value, StorageDestructor destructor) {
  if (const CUresult result = process::ready(); result != CUDA_SUCCESS) return result;
  return contexts().storagePut(context, key, value, destructor);
}
CUresult storageRemove(CUcontext context, void* key) {
  bool skip = false;
  if (const CUresult result = process::readyForCleanup(&skip); result != CUDA_SUCCESS) return result;
  return contexts().storageRemove(context, key);
}
CUresult storageGet(void** value, CUcontext context, void* key) {
  if (const CUresult result = process::ready(); result != CUDA_SUCCESS) return result;
  return contexts().storageGet(value, context, key);
}

// No size word here.
void* contextStorageTable[4];

// ---- TOOLS_CONTEXT ----

CUresult contextNumber(CUcontext context, uint64_t* id) {
  if (const CUresult result = process::ready(); result != CUDA_SUCCESS) return result;
  if (id == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (context == nullptr) {  // measured: no error, and not the current context's number
    *id = 0;
    return CUDA_SUCCESS;
  }
  return contexts().getId(context, id);
}

// The "object" behind a stream is a token: the handle itself, or for the special streams, whose handles are
// 0, 1 and 2, the address of a byte here.
unsigned char specialStreams[3];

CUresult streamObject(CUcontext context, CUstream stream, void** object) {
  if (const CUresult result = process::ready(); result != CUDA_SUCCESS) return result;
  uint64_t ignored = 0;
  if (object == nullptr || hooks() == nullptr ||
      hooks()->streamId(context, stream, &ignored) != CUDA_SUCCESS) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  const uint64_t id = toId(stream);
  *object =
      id < std::size(specialStreams) ? static_cast<void*>(&specialStreams[id]) : static_cast<void*>(stream);
  return CUDA_SUCCESS;
}

CUresult streamNumber(CUcontext context, void* object, uint64_t* out) {
  if (const CUresult result = process::ready(); result != CUDA_SUCCESS) return result;
  if (out == nullptr || hooks() == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto stream = static_cast<CUstream>(object);
  for (size_t i = 0; i < std::size(specialStreams); ++i) {
    if (object == &specialStreams[i]) stream = fromId<CUstream>(i);
  }
  return hooks()->streamId(context, stream, out);
}

// ---- TOOLS_MODULE ----

// Returns how many functions were visited, not a CUresult.
size_t visitFunctions(CUcontext, CUmodule module,
                      void (*visit)(void* user, CUfunction function, void* unknown), void* user) {
  if (process::ready() != CUDA_SUCCESS || hooks() == nullptr || visit == nullptr) return 0;
  std::vector<CUfunction> functions;
  if (const CUresult result = hooks()->functionsOfModule(module, &functions); result != CUDA_SUCCESS) {
    GPUPOOL_WARNING("the functions of a module cannot be listed: error %d", static_cast<int>(result));
    return 0;
  }
  for (CUfunction function : functions) visit(user, function, nullptr);
  return functions.size();
}

// ---- TPC_MAP ----

// cuBLASLt's heuristics for clusters (Hopper and later) ask for it and call slot 4 without looking at the
// error of cuGetExportTable. Measured: two arrays from malloc, which slot 13 takes back.
CUresult getTpcMap(unsigned char** gpcs, unsigned char** ranks) {
  if (const CUresult result = process::ready(); result != CUDA_SUCCESS) return result;
  if (gpcs == nullptr || ranks == nullptr || hooks() == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::vector<unsigned char> gpcOf, rankOf;
  if (const CUresult result = hooks()->tpcMap(&gpcOf, &rankOf); result != CUDA_SUCCESS) return result;
  const auto copy = [](const std::vector<unsigned char>& from) {
    auto* to = static_cast<unsigned char*>(std::malloc(from.size() + 1));
    if (to != nullptr) std::copy(from.begin(), from.end(), to);
    return to;
  };
  *gpcs = copy(gpcOf);
  *ranks = copy(rankOf);
  return *gpcs != nullptr && *ranks != nullptr ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult freeTpcMap(unsigned char* gpcs, unsigned char* ranks) {
  std::free(gpcs);
  std::free(ranks);
  return CUDA_SUCCESS;
}

// ---- INTEGRITY_CHECK ----

#if GPUPOOL_CUDART_SELFTEST
CUresult checkIntegrity(uint32_t version, uint64_t seconds, uint8_t* out) {
  if (const CUresult result = process::ready(); result != CUDA_SUCCESS) return result;
  if (out == nullptr || hooks() == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::vector<selftest::DeviceIdentity> devices(static_cast<size_t>(hooks()->deviceCount()));
  for (size_t i = 0; i < devices.size(); ++i) {
    auto& device = devices[i];
    const CUresult result = hooks()->deviceIdentity(static_cast<int>(i), &device.uuid, &device.pciDomain,
                                                    &device.pciBus, &device.pciDevice);
    if (result != CUDA_SUCCESS) return result;
  }
  const auto address = [](const void* pointer) {
    return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(pointer));
  };
  const selftest::Question question{
      .driverVersion = kDriverVersion,
      .version = version,
      .processId = static_cast<uint32_t>(getpid()),
      .thread = static_cast<uint32_t>(pthread_self()),
      .cudartInterface = address(CudartInterface::slots),
      .integrityCheck = address(IntegrityCheck::slots),
      .integrityFunction = address(IntegrityCheck::slots[1]),
      .seconds = seconds,
  };
  const auto answer = selftest::answer(question, devices);
  std::memcpy(out, answer.data(), answer.size());
  return CUDA_SUCCESS;
}
#else
CUresult checkIntegrity(uint32_t, uint64_t, uint8_t*) {
  static constinit std::atomic<bool> logged{false};
  if (!logged.exchange(true)) {
    GPUPOOL_ERROR(
        "built without cudart's self-test (GPUPOOL_CUDART_SELFTEST=OFF): programs with a CUDA runtime cannot "
        "run");
  }
  return CUDA_ERROR_NOT_SUPPORTED;
}
#endif

// ---- the list ----

void fillTables() {
  CudartInterface::fill();
  CudartInterface::set(1, loadModule);
  CudartInterface::set(2, primaryHandle);
  CudartInterface::set(6, loadWrapped);
  CudartInterface::set(8, loadBare);
  CudartInterface::set(12, loadCompilers);
  ToolsHooks::fill();
  ToolsHooks::set(2, getCallbackFlags);
  ToolsHooks::set(6, getResourceFlags);
  ToolsTls::fill();
  ToolsTls::set(2, currentForTools);
  ContextChecks::fill();
  ContextChecks::set(2, checkContext);
  ContextChecks::set(3, checkNothing);
  IntegrityCheck::fill();
  IntegrityCheck::set(1, checkIntegrity);
  ToolsContext::fill();
  ToolsContext::set(4, contextNumber);
  ToolsContext::set(39, streamNumber);
  ToolsContext::set(51, streamObject);
  ToolsModule::fill();
  ToolsModule::set(7, visitFunctions);
  TpcMap::fill();
  TpcMap::set(4, getTpcMap);
  TpcMap::set(13, freeTpcMap);
  contextStorageTable[0] = reinterpret_cast<void*>(&storagePut);
  contextStorageTable[1] = reinterpret_cast<void*>(&storageRemove);
  contextStorageTable[2] = reinterpret_cast<void*>(&storageGet);
}

struct Entry {
  unsigned char id[16];
  void** table;
};

constexpr Entry kEntries[] = {
    {{0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9},
     CudartInterface::slots},
    {{0xa0, 0x94, 0x79, 0x8c, 0x2e, 0x74, 0x2e, 0x74, 0x93, 0xf2, 0x08, 0x00, 0x20, 0x0c, 0x0a, 0x66},
     ToolsHooks::slots},
    {{0x42, 0xd8, 0x5a, 0x81, 0x23, 0xf6, 0xcb, 0x47, 0x82, 0x98, 0xf6, 0xe7, 0x8a, 0x3a, 0xec, 0xdc},
     ToolsTls::slots},
    {{0xc6, 0x93, 0x33, 0x6e, 0x11, 0x21, 0xdf, 0x11, 0xa8, 0xc3, 0x68, 0xf3, 0x55, 0xd8, 0x95, 0x93},
     contextStorageTable},
    {{0x26, 0x3e, 0x88, 0x60, 0x7c, 0xd2, 0x61, 0x43, 0x92, 0xf6, 0xbb, 0xd5, 0x00, 0x6d, 0xfa, 0x7e},
     ContextChecks::slots},
    {{0xd4, 0x08, 0x20, 0x55, 0xbd, 0xe6, 0x70, 0x4b, 0x8d, 0x34, 0xba, 0x12, 0x3c, 0x66, 0xe1, 0xf2},
     IntegrityCheck::slots},
    {{0x21, 0x31, 0x8c, 0x60, 0x97, 0x14, 0x32, 0x48, 0x8c, 0xa6, 0x41, 0xff, 0x73, 0x24, 0xc8, 0xf2},
     ToolsContext::slots},
    {{0x6e, 0x16, 0x3f, 0xbe, 0xb9, 0x58, 0x44, 0x4d, 0x83, 0x5c, 0xe1, 0x82, 0xaf, 0xf1, 0x99, 0x1e},
     ToolsModule::slots},
    {{0x17, 0x34, 0xdc, 0x26, 0x80, 0x0d, 0x47, 0x45, 0x87, 0x26, 0xc0, 0xf1, 0xe7, 0xdd, 0x8b, 0xca},
     TpcMap::slots},
};

}  // namespace

void setExportTableHooks(const ExportTableHooks& hooks) {
  currentHooks.store(&hooks, std::memory_order_release);
}

CUresult getExportTable(const void** table, const CUuuid* id) {
  if (table == nullptr || id == nullptr) return CUDA_ERROR_INVALID_VALUE;
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, fillTables);
  *table = nullptr;
  for (const Entry& entry : kEntries) {
    if (std::memcmp(entry.id, id->bytes, sizeof entry.id) != 0) continue;
    *table = entry.table;
    return CUDA_SUCCESS;
  }
  uint32_t words[4];
  std::memcpy(words, id->bytes, sizeof words);
  for (uint32_t& word : words) word = __builtin_bswap32(word);  // as tools print the bytes
  GPUPOOL_DEBUG("export table %08x%08x%08x%08x is unknown", words[0], words[1], words[2], words[3]);
  return CUDA_ERROR_INVALID_VALUE;
}

}  // namespace gpupool::client
