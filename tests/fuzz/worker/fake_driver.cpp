#include "tests/fuzz/worker/fake_driver.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <unordered_map>

#include "schema/handles.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/worker/fake_functions.h"

namespace gpupool::fuzz {

[[noreturn]] void broken(const char* what, uint64_t address, size_t bytes) {
  std::fprintf(stderr, "the worker let the driver have %s: %llx + %zx\n", what,
               static_cast<unsigned long long>(address), bytes);
  std::abort();
}

bool within(const std::map<uint64_t, size_t>& ranges, uint64_t address, size_t bytes) {
  for (auto [start, size] : ranges)
    if (address >= start && address - start <= size && bytes <= size - (address - start)) return true;
  return false;
}

void DriverState::reset(uint64_t seed) {
  windows.clear();
  host.clear();
  managed.clear();
  globals.clear();
  own.clear();
  words.clear();
  current = nullptr;
  children = 0;
  seed_ = seed * 2 + 1;
  handles_ = 0;
}

uint64_t DriverState::random() {
  seed_ ^= seed_ << 13;
  seed_ ^= seed_ >> 7;
  seed_ ^= seed_ << 17;
  return seed_;
}

CUresult DriverState::chance() {
  switch (random() % 32) {
    case 0:
      return CUDA_ERROR_INVALID_VALUE;
    case 1:
      return random() % 8 == 0 ? CUDA_ERROR_ASSERT : CUDA_ERROR_OUT_OF_MEMORY;
    default:
      return CUDA_SUCCESS;
  }
}

bool DriverState::isWord(uint64_t address) const { return within(words, address, 8); }
bool DriverState::isHost(uint64_t address, size_t bytes) const {
  return within(host, address, bytes) || within(managed, address, bytes);
}
void DriverState::needHost(uint64_t address, size_t bytes) const {
  if (!isHost(address, bytes)) broken("host memory that is not the session's", address, bytes);
}
void DriverState::needDevice(uint64_t address, size_t bytes) const {
  if (!within(windows, address, bytes) && !within(globals, address, bytes) && !within(own, address, bytes) &&
      !isHost(address, bytes))
    broken("memory that is not the session's", address, bytes);
}

void DriverState::needHandle(uint64_t value) const {
  // 1 and 2: the special streams.
  if (value > 2 && (value <= kHandles || value > kHandles + 64 * handles_ || value % 64 != 0))
    broken("a handle that it never made", value, 0);
}

DriverState& driverState() {
  static auto* state = new DriverState;
  return *state;
}

namespace {

// ---- any function: outputs are handles and nothing else, inputs can be read
template <class T>
void argument(T& value) {
  using P = std::remove_pointer_t<T>;
  if constexpr (std::is_same_v<T, const char*>) {
    if (value != nullptr) touch(value, std::strlen(value));
  } else if constexpr (schema::isHandle<T>) {
    state().needHandle(schema::rawHandle(value));
  } else if constexpr (std::is_pointer_v<T> && !schema::isHandle<T> && !std::is_void_v<P> &&
                       !std::is_function_v<P>) {
    if (value == nullptr) return;
    if constexpr (std::is_const_v<P> && sizeof(T) != 0) {
      if constexpr (requires { sizeof(P); }) touch(value, sizeof(P));
    } else if constexpr (schema::isHandle<P>) {
      *value = schema::asHandle<P>(state().fresh());
    }
  }
}

template <class F>
struct Any;
template <class... A>
struct Any<CUresult(A...)> {
  static CUresult call(A... arguments) {
    if (CUresult status = state().chance(); status != CUDA_SUCCESS) return status;
    (argument(arguments), ...);
    return CUDA_SUCCESS;
  }
};

// ---- what the functions with something to watch do instead
CUresult getErrorText(CUresult, const char** text) {
  *text = "an error";
  return CUDA_SUCCESS;
}
// This driver has none.
CUresult exportTable(const void**, const CUuuid*) { return CUDA_ERROR_NOT_FOUND; }
CUresult deviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult deviceAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9 : 0;
  return CUDA_SUCCESS;
}
CUresult totalMemory(size_t* bytes, CUdevice) {
  *bytes = size_t{1} << 33;
  return CUDA_SUCCESS;
}
CUresult canAccess(int* can, CUdevice, CUdevice) {
  *can = 1;
  return CUDA_SUCCESS;
}
CUresult setCurrent(CUcontext context) {
  state().current = context;
  return CUDA_SUCCESS;
}
CUresult getCurrent(CUcontext* context) {
  *context = state().current;
  return CUDA_SUCCESS;
}
CUresult contextDevice(CUdevice* device) {
  *device = static_cast<CUdevice>(state().random() % 2);
  return CUDA_SUCCESS;
}
const std::unordered_map<std::string_view, void*>& table() {
  static const auto* functions = [] {
    auto* all = new std::unordered_map<std::string_view, void*>{
#define NAME(name) {#name, reinterpret_cast<void*>(&Any<decltype(::name)>::call)},
#include "schema/names.def"
#undef NAME
    };
    const Function special[] = {
        FUNCTION(cuGetErrorName, getErrorText),          FUNCTION(cuGetErrorString, getErrorText),
        FUNCTION(cuGetExportTable, exportTable),         FUNCTION(cuDeviceGet, deviceGet),
        FUNCTION(cuDeviceGetAttribute, deviceAttribute), FUNCTION(cuDeviceTotalMem_v2, totalMemory),
        FUNCTION(cuDeviceCanAccessPeer, canAccess),      FUNCTION(cuCtxSetCurrent, setCurrent),
        FUNCTION(cuCtxGetCurrent, getCurrent),           FUNCTION(cuCtxGetDevice, contextDevice),
    };
    for (const auto& part : {std::span<const Function>(special), memoryFunctions(), codeFunctions()})
      for (const auto& [name, function] : part) (*all)[name] = function;
    return all;
  }();
  return *functions;
}

}  // namespace

const server::Driver& fakeDriver() {
  static const server::Driver* driver = server::Driver::load().release();
  return *driver;
}

void* functionOf(const char* name) {
  auto found = table().find(name);
  return found == table().end() ? nullptr : found->second;
}

}  // namespace gpupool::fuzz

// In place of server/driver.cpp.
namespace gpupool::server {

std::unique_ptr<const Driver> Driver::load(const std::string&) {
  std::unique_ptr<Driver> driver(new Driver);
#define NAME(name) driver->name = reinterpret_cast<decltype(&::name)>(fuzz::functionOf(#name));
#include "schema/names.def"
#undef NAME
  return driver;
}

std::string Driver::describe(CUresult result) const { return "error " + std::to_string(result); }

}  // namespace gpupool::server
