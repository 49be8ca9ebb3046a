// Modules and libraries.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "client/calls/jit_options.h"
#include "client/code.h"
#include "client/entry.h"
#include "client/memory/allocations.h"
#include "client/memory/host.h"
#include "client/visible_devices.h"

namespace gpupool::client {
namespace {

constexpr size_t kPiece = size_t{256} << 10;
constexpr size_t kMaxParameters = 4096;

// One image out of a device-linked program: [u64 count, then per fatbin: u64 bytes, bytes padded to 8], the
// linked one first.
std::vector<std::byte> joinLinked(const CodeImage& code) {
  schema::ByteBuffer all;
  all.value<uint64_t>(1 + code.prelinked.size());
  all.blob(code.bytes.data(), code.bytes.size());
  for (auto part : code.prelinked) all.blob(part.data(), part.size());
  return {all.span().begin(), all.span().end()};
}

template <schema::Name N, class Handle, class Table>
CUresult load(Table& table, Handle* out, const void* image, CUcontext context, JitOptions& options) {
  if (out == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CodeImage code;
  CUresult status = recogniseImage(image, &code);
  if (status != CUDA_SUCCESS) return status;
  // A device-linked fatbin (wrapper 2) may hold machine code only; the PTX is in what was linked. Both
  // travel.
  std::vector<std::byte> joined;
  std::span<const std::byte> bytes = code.bytes;
  unsigned kind = wrapperVersion(code.form);
  if (kind == 2) {
    joined = joinLinked(code);
    bytes = joined;
  }
  schema::ImageName name;
  status = sendImage(context, bytes, name);
  if (status != CUDA_SUCCESS) return status;
  auto made = table.create();
  if (made.object == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  auto handle = fromId<Handle>(made.id);
  unsigned printing = 0;
  status = Session::get().await<N>(context, &handle, name, kind, options.names.data(), options.values.data(),
                                   options.count(), options.info, options.infoBytes, options.error,
                                   options.errorBytes, &printing);
  options.finish();
  if (status != CUDA_SUCCESS) {
    table.destroy(made.id);
    return status;
  }
  made.object->printing = printing != 0;
  made.object->context = context;
  *out = handle;
  return CUDA_SUCCESS;
}

CUresult loadModule(CUmodule* out, const void* image, unsigned count, CUjit_option* names, void** values) {
  Context* context = nullptr;
  CUresult status = contexts().resolve(nullptr, &context);
  if (status != CUDA_SUCCESS) return status;
  JitOptions options(count, names, values);
  return load<"sessionModuleLoad">(modules, out, image, context->handle, options);
}

// A library has no context; the worker's driver wants none either.
CUresult loadLibrary(CUlibrary* out, const void* image, unsigned count, CUjit_option* names, void** values) {
  JitOptions options(count, names, values);
  return load<"sessionLibraryLoad">(libraries, out, image, nullptr, options);
}

}  // namespace

bool readFile(const char* path, std::vector<char>& bytes) {
  std::FILE* file = path == nullptr ? nullptr : std::fopen(path, "rb");
  if (file == nullptr) return false;
  char block[65536];
  for (size_t n; (n = std::fread(block, 1, sizeof block, file)) > 0;)
    bytes.insert(bytes.end(), block, block + n);
  std::fclose(file);
  bytes.push_back(0);
  return true;
}

namespace {

// The same name asked twice gives the same handle: cudart maps handles back to host stubs.
template <class Handle, class Table, class Ask>
CUresult named(Library& owner, Table& table, const char* name, Handle* out, uint64_t ownerId,
               CUcontext context, Ask&& ask) {
  if (out == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(owner.mutex);
  for (auto& [known, id] : owner.kernels)
    if (known == name) {
      *out = fromId<Handle>(id);
      return CUDA_SUCCESS;
    }
  auto made = table.create();
  if (made.object == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  auto handle = fromId<Handle>(made.id);
  CUresult status = ask(&handle);
  if (status != CUDA_SUCCESS) {
    table.destroy(made.id);
    return status;
  }
  made.object->library = ownerId;
  made.object->name = name;
  made.object->nameKnown = true;
  made.object->context = context;
  owner.kernels.emplace_back(name, made.id);
  *out = handle;
  return CUDA_SUCCESS;
}

template <class Table>
void forgetKernels(Library& owner, Table& table) {
  std::lock_guard lock(owner.mutex);
  for (auto& [name, id] : owner.kernels) table.destroy(id);
  owner.kernels.clear();
}

// A global's range is noted: copies and pointer attributes ask for it.
CUresult noteGlobal(Library& owner, CUresult status, CUdeviceptr address, size_t bytes,
                    Allocation::Kind kind) {
  if (status != CUDA_SUCCESS) return status;
  {
    std::lock_guard lock(owner.mutex);
    if (std::find(owner.globals.begin(), owner.globals.end(), address) == owner.globals.end())
      owner.globals.push_back(address);
  }
  Context* context = nullptr;
  contexts().resolve(nullptr, &context);
  Allocation known;
  if (!allocations().find(address, known) || known.address != address)
    allocations().add({address, bytes, kind, context != nullptr ? context->device : 0,
                       context != nullptr ? context->handle : nullptr, 0, address, 0, nullptr});
  return CUDA_SUCCESS;
}

// Before the unload is sent: a synchronisation must not ask for memory that is gone.
void forgetGlobals(Library& owner) {
  std::vector<uint64_t> gone;
  {
    std::lock_guard lock(owner.mutex);
    gone.swap(owner.globals);
  }
  for (uint64_t address : gone) {
    Allocation global;
    if (!allocations().find(address, global) || global.address != address) continue;
    allocations().remove(address);
    hostMemory().dropManagedSymbol(address, global.bytes);
  }
}

}  // namespace

CUresult sendImage(CUcontext context, std::span<const std::byte> bytes, schema::ImageName& name) {
  Session& session = Session::get();
  name = nameOfImage(bytes);
  unsigned have = 0;
  CUresult status = session.await<"sessionImageOffer">(context, name, &have);
  for (size_t at = 0; status == CUDA_SUCCESS && have == 0 && at < bytes.size(); at += kPiece) {
    size_t n = std::min(kPiece, bytes.size() - at);
    status = session.post<"sessionImageData">(context, name, at,
                                              reinterpret_cast<const unsigned char*>(bytes.data() + at), n);
  }
  return status;
}

Function* findFunction(CUfunction handle) {
  uint64_t id = toId(handle);
  if (Function* function = kernels.find(id)) return function;
  return functions.find(id);
}

void notePrinting(const Function& function) {
  Session& session = Session::get();
  if (session.printing()) return;
  const bool ofLibrary = handles::kindOf(function.library) == Kind::library;
  const Library* owner = ofLibrary ? libraries.find(function.library) : modules.find(function.library);
  if (owner != nullptr && owner->printing) session.setPrinting();
}

CUresult describe(CUfunction handle, Function& function, CUcontext context, CUdevice device) {
  if (function.described.load(std::memory_order_acquire)) return CUDA_SUCCESS;
  std::lock_guard lock(function.mutex);
  if (function.described.load(std::memory_order_relaxed)) return CUDA_SUCCESS;
  std::vector<schema::ParameterLayout> layout(kMaxParameters);
  size_t count = layout.size();
  CUresult status = Session::get().await<"sessionFunctionInfo">(context, handle, device, &function.info,
                                                                layout.data(), &count);
  if (status != CUDA_SUCCESS) return status;
  // Attributes change, the layout never does: other threads may be packing by it right now.
  if (!function.laidOut) {
    layout.resize(std::min(count, layout.size()));
    if (!function.packer.setLayout(layout)) return CUDA_ERROR_NOT_SUPPORTED;
    function.layout = layout;
    function.laidOut = true;
  }
  function.described.store(true, std::memory_order_release);
  return CUDA_SUCCESS;
}

CUresult functionName(CUfunction handle, Function& function, CUcontext context, const char** name) {
  if (!function.nameKnown.load(std::memory_order_acquire)) {
    char text[4096] = {};
    CUresult status = Session::get().await<"sessionFunctionName">(context, handle, static_cast<char*>(text),
                                                                  int{sizeof text});
    if (status != CUDA_SUCCESS) return status;
    std::lock_guard lock(function.mutex);
    if (!function.nameKnown.load()) function.name = text;
    function.nameKnown.store(true, std::memory_order_release);
  }
  *name = function.name.c_str();
  return CUDA_SUCCESS;
}

CUresult functionsOfModule(CUmodule module, std::vector<CUfunction>* out) {
  Library* owner = modules.find(toId(module));
  if (owner == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  std::vector<CUfunction> found(4096);
  size_t count = found.size();
  CUresult status =
      Session::get().await<"sessionModuleFunctions">(owner->context, module, found.data(), &count);
  if (status != CUDA_SUCCESS) return status;
  found.resize(std::min(count, found.size()));
  out->clear();
  for (CUfunction theirs : found) {
    // Through the name it gets the very handle that cuModuleGetFunction gives.
    char text[4096] = {};
    CUfunction mine = nullptr;
    status = Session::get().await<"sessionFunctionName">(owner->context, theirs, static_cast<char*>(text),
                                                         int{sizeof text});
    if (status == CUDA_SUCCESS) status = custom::cuModuleGetFunction(&mine, module, text);
    if (status != CUDA_SUCCESS) return status;
    out->push_back(mine);
  }
  return CUDA_SUCCESS;
}

namespace custom {

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
  if (mode == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *mode = moduleLoadingMode(std::getenv("CUDA_MODULE_LOADING"));
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule* out, const void* image) {
  return loadModule(out, image, 0, nullptr, nullptr);
}
CUresult cuModuleLoadDataEx(CUmodule* out, const void* image, unsigned count, CUjit_option* names,
                            void** values) {
  return loadModule(out, image, count, names, values);
}
CUresult cuModuleLoadFatBinary(CUmodule* out, const void* image) {
  return loadModule(out, image, 0, nullptr, nullptr);
}
CUresult cuModuleLoad(CUmodule* out, const char* path) {
  std::vector<char> bytes;
  return readFile(path, bytes) ? loadModule(out, bytes.data(), 0, nullptr, nullptr)
                               : CUDA_ERROR_FILE_NOT_FOUND;
}
CUresult cuModuleUnload(CUmodule module) {
  Library* owner = modules.find(toId(module));
  if (owner == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  CUcontext context = owner->context;
  forgetKernels(*owner, functions);
  forgetGlobals(*owner);
  if (!modules.destroy(toId(module))) return CUDA_ERROR_INVALID_HANDLE;
  return Session::get().await<"cuModuleUnload">(context, module);
}

CUresult cuModuleGetFunction(CUfunction* out, CUmodule module, const char* name) {
  Library* owner = modules.find(toId(module));
  if (owner == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return named(*owner, functions, name, out, toId(module), owner->context, [&](CUfunction* made) {
    return Session::get().await<"cuModuleGetFunction">(owner->context, made, module, name);
  });
}

CUresult cuModuleEnumerateFunctions(CUfunction* out, unsigned count, CUmodule module) {
  std::vector<CUfunction> all;
  CUresult status = functionsOfModule(module, &all);
  if (status == CUDA_SUCCESS && out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; status == CUDA_SUCCESS && i < count && i < all.size(); ++i) out[i] = all[i];
  return status;
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr* address, size_t* bytes, CUmodule module, const char* name) {
  Library* owner = modules.find(toId(module));
  if (owner == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (name == nullptr || (address == nullptr && bytes == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  CUdeviceptr at = 0;
  size_t n = 0;
  CUresult status = Session::get().await<"cuModuleGetGlobal_v2">(owner->context, &at, &n, module, name);
  status = noteGlobal(*owner, status, at, n, Allocation::Kind::symbol);
  if (status == CUDA_SUCCESS && address != nullptr) *address = at;
  if (status == CUDA_SUCCESS && bytes != nullptr) *bytes = n;
  return status;
}

CUresult cuLibraryLoadData(CUlibrary* out, const void* image, CUjit_option* names, void** values,
                           unsigned count, CUlibraryOption* libraryNames, void** libraryValues,
                           unsigned libraryCount) {
  // CU_LIBRARY_BINARY_IS_PRESERVED lets a driver keep the pointer: the worker's keeps the worker's image.
  (void)libraryNames, (void)libraryValues, (void)libraryCount;
  return loadLibrary(out, image, count, names, values);
}
CUresult cuLibraryLoadFromFile(CUlibrary* out, const char* path, CUjit_option* names, void** values,
                               unsigned count, CUlibraryOption*, void**, unsigned) {
  std::vector<char> bytes;
  return readFile(path, bytes) ? loadLibrary(out, bytes.data(), count, names, values)
                               : CUDA_ERROR_FILE_NOT_FOUND;
}
CUresult cuLibraryUnload(CUlibrary library) {
  Library* owner = libraries.find(toId(library));
  if (owner == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  forgetKernels(*owner, kernels);
  forgetGlobals(*owner);
  if (!libraries.destroy(toId(library))) return CUDA_ERROR_INVALID_HANDLE;
  return Session::get().await<"cuLibraryUnload">(CUcontext{nullptr}, library);
}
CUresult cuLibraryGetKernel(CUkernel* out, CUlibrary library, const char* name) {
  Library* owner = libraries.find(toId(library));
  if (owner == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return named(*owner, kernels, name, out, toId(library), nullptr, [&](CUkernel* made) {
    return Session::get().await<"cuLibraryGetKernel">(CUcontext{nullptr}, made, library, name);
  });
}
CUresult cuLibraryEnumerateKernels(CUkernel* out, unsigned count, CUlibrary library) {
  Library* owner = libraries.find(toId(library));
  if (owner == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::vector<CUkernel> theirs(count);
  size_t n = count;
  CUresult status =
      Session::get().await<"sessionLibraryKernels">(CUcontext{nullptr}, library, theirs.data(), &n);
  for (size_t i = 0; status == CUDA_SUCCESS && i < n; ++i) {
    char text[4096] = {};
    status = Session::get().await<"sessionFunctionName">(CUcontext{nullptr},
                                                         reinterpret_cast<CUfunction>(theirs[i]),
                                                         static_cast<char*>(text), int{sizeof text});
    if (status == CUDA_SUCCESS) status = custom::cuLibraryGetKernel(&out[i], library, text);
  }
  return status;
}
CUresult cuLibraryGetModule(CUmodule* out, CUlibrary library) {
  Context* context = nullptr;
  CUresult status = contexts().resolve(nullptr, &context);
  if (status != CUDA_SUCCESS) return status;
  Library* owner = libraries.find(toId(library));
  if (owner == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(owner->mutex);
  if (owner->module == nullptr) {
    auto made = modules.create();
    auto handle = fromId<CUmodule>(made.id);
    status = Session::get().await<"cuLibraryGetModule">(context->handle, &handle, library);
    if (status != CUDA_SUCCESS) {
      modules.destroy(made.id);
      return status;
    }
    made.object->context = context->handle;
    made.object->printing = owner->printing;
    owner->module = handle;
  }
  *out = owner->module;
  return CUDA_SUCCESS;
}
CUresult cuLibraryGetGlobal(CUdeviceptr* address, size_t* bytes, CUlibrary library, const char* name) {
  Context* context = nullptr;
  CUresult status = contexts().resolve(nullptr, &context);
  if (status != CUDA_SUCCESS) return status;
  Library* owner = libraries.find(toId(library));
  if (owner == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (name == nullptr || (address == nullptr && bytes == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  CUdeviceptr at = 0;
  size_t n = 0;
  status = Session::get().await<"cuLibraryGetGlobal">(context->handle, &at, &n, library, name);
  status = noteGlobal(*owner, status, at, n, Allocation::Kind::symbol);
  if (status == CUDA_SUCCESS && address != nullptr) *address = at;
  if (status == CUDA_SUCCESS && bytes != nullptr) *bytes = n;
  return status;
}
CUresult cuLibraryGetManaged(CUdeviceptr* address, size_t* bytes, CUlibrary library, const char* name) {
  Library* owner = libraries.find(toId(library));
  if (owner == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (name == nullptr || (address == nullptr && bytes == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  CUdeviceptr at = 0;
  size_t n = 0;
  // Asked before any context exists (cudart's bootstrap), so none is named.
  CUresult status = Session::get().await<"cuLibraryGetManaged">(CUcontext{nullptr}, &at, &n, library, name);
  if (status == CUDA_SUCCESS) status = hostMemory().adoptManagedSymbol(at, n);
  status = noteGlobal(*owner, status, at, n, Allocation::Kind::managedSymbol);
  if (status == CUDA_SUCCESS && address != nullptr) *address = at;
  if (status == CUDA_SUCCESS && bytes != nullptr) *bytes = n;
  return status;
}

CUresult cuKernelGetFunction(CUfunction* out, CUkernel kernel) {
  Context* context = nullptr;
  CUresult status = contexts().resolve(nullptr, &context);
  if (status != CUDA_SUCCESS) return status;
  Function* entry = kernels.find(toId(kernel));
  if (entry == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(entry->mutex);
  if (entry->function == nullptr) {
    auto made = functions.create();
    auto handle = fromId<CUfunction>(made.id);
    status = Session::get().await<"cuKernelGetFunction">(context->handle, &handle, kernel);
    if (status != CUDA_SUCCESS) {
      functions.destroy(made.id);
      return status;
    }
    made.object->kernel = kernel;
    made.object->library = entry->library;
    made.object->name = entry->name;
    made.object->nameKnown = entry->nameKnown.load();
    made.object->context = context->handle;
    entry->function = handle;
  }
  *out = entry->function;
  return CUDA_SUCCESS;
}

CUresult cuKernelGetLibrary(CUlibrary* out, CUkernel kernel) {
  Function* entry = kernels.find(toId(kernel));
  if (entry == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = fromId<CUlibrary>(entry->library);
  return CUDA_SUCCESS;
}
CUresult cuFuncGetModule(CUmodule* out, CUfunction function) {
  Function* entry = functions.find(toId(function));
  if (entry == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (handles::kindOf(entry->library) == Kind::library)
    return custom::cuLibraryGetModule(out, fromId<CUlibrary>(entry->library));
  *out = fromId<CUmodule>(entry->library);
  return CUDA_SUCCESS;
}

namespace {
CUresult described(CUfunction handle, Function*& entry, CUdevice device) {
  entry = findFunction(handle);
  if (entry == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  Context* context = nullptr;
  contexts().resolve(nullptr, &context);
  if (device < 0) device = context != nullptr ? context->device : 0;
  CUcontext in = entry->context != nullptr ? entry->context : context != nullptr ? context->handle : nullptr;
  return describe(handle, *entry, in, device);
}
CUresult attributeOf(CUfunction handle, int* value, CUfunction_attribute attribute, CUdevice device) {
  Function* entry = nullptr;
  if (value == nullptr || attribute < 0 || attribute >= schema::kFunctionAttributes)
    return CUDA_ERROR_INVALID_VALUE;
  CUresult status = described(handle, entry, device);
  if (status != CUDA_SUCCESS) return status;
  std::lock_guard lock(entry->mutex);
  if ((entry->info.known >> attribute & 1) == 0) return CUDA_ERROR_INVALID_VALUE;
  *value = entry->info.attributes[attribute];
  return CUDA_SUCCESS;
}
CUresult parameterInfo(CUfunction handle, size_t index, size_t* offset, size_t* size) {
  Function* entry = nullptr;
  if (offset == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUresult status = described(handle, entry, -1);
  if (status != CUDA_SUCCESS) return status;
  if (index >= entry->layout.size()) return CUDA_ERROR_INVALID_VALUE;
  *offset = entry->layout[index].offset;
  if (size != nullptr) *size = entry->layout[index].size;
  return CUDA_SUCCESS;
}
// A set attribute makes what is known of the kernel stale, of its function or kernel twin too.
void forgetDescription(Function& entry) {
  entry.described = false;
  entry.lastAccepted = 0;
  std::lock_guard lock(entry.mutex);
  entry.accepted.clear();
  if (entry.function != nullptr)
    if (Function* twin = functions.find(toId(entry.function)))
      twin->described = false, twin->lastAccepted = 0;
  if (entry.kernel != nullptr)
    if (Function* twin = kernels.find(toId(entry.kernel))) twin->described = false, twin->lastAccepted = 0;
}
}  // namespace

CUresult cuKernelGetAttribute(int* value, CUfunction_attribute attribute, CUkernel kernel, CUdevice device) {
  if (propertiesOf(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  return attributeOf(reinterpret_cast<CUfunction>(kernel), value, attribute, device);
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  return attributeOf(function, value, attribute, -1);
}
CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t* offset, size_t* size) {
  if (kernels.find(toId(kernel)) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return parameterInfo(reinterpret_cast<CUfunction>(kernel), index, offset, size);
}
CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t* offset, size_t* size) {
  if (functions.find(toId(function)) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return parameterInfo(function, index, offset, size);
}
CUresult cuKernelGetName(const char** name, CUkernel kernel) {
  Function* entry = kernels.find(toId(kernel));
  if (entry == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return name == nullptr ? CUDA_ERROR_INVALID_VALUE
                         : functionName(reinterpret_cast<CUfunction>(kernel), *entry, nullptr, name);
}
CUresult cuFuncGetName(const char** name, CUfunction function) {
  Function* entry = findFunction(function);
  if (entry == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return name == nullptr ? CUDA_ERROR_INVALID_VALUE : functionName(function, *entry, entry->context, name);
}
CUresult cuFuncIsLoaded(CUfunctionLoadingState* state, CUfunction function) {
  if (findFunction(function) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (state == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *state = CU_FUNCTION_LOADING_STATE_LOADED;
  return CUDA_SUCCESS;
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device) {
  Function* entry = kernels.find(toId(kernel));
  if (entry == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (propertiesOf(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (entry->described && attribute >= 0 && attribute < schema::kFunctionAttributes &&
      entry->info.attributes[attribute] == value)
    return CUDA_SUCCESS;  // libraries set the same value before every launch
  Context* context = nullptr;
  contexts().resolve(nullptr, &context);
  CUresult status = Session::get().await<"cuKernelSetAttribute">(
      context != nullptr ? context->handle : nullptr, attribute, value, kernel, device);
  if (status == CUDA_SUCCESS) forgetDescription(*entry);
  return status;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  Function* entry = findFunction(function);
  if (entry == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (entry->described && attribute >= 0 && attribute < schema::kFunctionAttributes &&
      entry->info.attributes[attribute] == value)
    return CUDA_SUCCESS;
  Context* context = nullptr;
  CUresult status = contexts().resolve(nullptr, &context);
  if (status == CUDA_SUCCESS)
    status = Session::get().await<"cuFuncSetAttribute">(context->handle, function, attribute, value);
  if (status == CUDA_SUCCESS) forgetDescription(*entry);
  return status;
}
CUresult cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice device) {
  Context* context = nullptr;
  contexts().resolve(nullptr, &context);
  if (kernels.find(toId(kernel)) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return Session::get().await<"cuKernelSetCacheConfig">(context != nullptr ? context->handle : nullptr,
                                                        kernel, config, device);
}
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) {
  Context* context = nullptr;
  CUresult status = contexts().resolve(nullptr, &context);
  if (findFunction(function) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return status == CUDA_SUCCESS
             ? Session::get().await<"cuFuncSetCacheConfig">(context->handle, function, config)
             : status;
}
CUresult cuFuncSetSharedMemConfig(CUfunction function, CUsharedconfig) {
  return findFunction(function) == nullptr ? CUDA_ERROR_INVALID_HANDLE
                                           : CUDA_SUCCESS;  // no effect on these devices
}

}  // namespace custom
}  // namespace gpupool::client
