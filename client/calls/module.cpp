// Modules and libraries: loading, what they hold, and their end.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "client/calls/jit_options.h"
#include "client/code.h"
#include "client/entry.h"
#include "client/functions.h"
#include "client/memory/allocations.h"
#include "client/memory/host.h"
#include "client/visible_devices.h"

namespace gpupool::client {
namespace {

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

// home: a module's context; null for a library.
template <schema::Name N, class Handle, class Table>
CUresult load(Table& table, Handle* out, const void* image, Context* home, JitOptions& options) {
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
  const CUcontext context = home != nullptr ? home->handle : nullptr;
  const uint64_t life = home != nullptr ? home->id.load() : 0;
  status = sendImage(context, bytes, name);
  if (status != CUDA_SUCCESS) return status;
  auto made = table.prepare();
  if (made.object == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  auto handle = fromId<Handle>(made.id);
  unsigned printing = 0;
  status = Session::get().await<N>(context, &handle, name, kind, options.names.data(), options.values.data(),
                                   options.count(), options.info, options.infoBytes, options.error,
                                   options.errorBytes, &printing);
  options.finish();
  if (status != CUDA_SUCCESS) {
    table.discard(made.id);
    return status;
  }
  made.object->printing = printing != 0;
  made.object->context = context;
  made.object->life = life;
  table.publish(made.id);
  *out = handle;
  return CUDA_SUCCESS;
}

CUresult loadModule(CUmodule* out, const void* image, unsigned count, CUjit_option* names, void** values) {
  Context* context = nullptr;
  CUresult status = contexts().resolve(nullptr, &context);
  if (status != CUDA_SUCCESS) return status;
  JitOptions options(count, names, values);
  return load<"sessionModuleLoad">(modules, out, image, context, options);
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
  size_t n = sizeof block;
  while (n == sizeof block) {
    n = std::fread(block, 1, sizeof block, file);
    bytes.insert(bytes.end(), block, block + n);
  }
  const bool whole = std::ferror(file) == 0;
  std::fclose(file);
  bytes.push_back(0);
  return whole;
}

namespace {

// The same name asked twice gives the same handle: cudart maps handles back to host stubs.
template <class Handle, class Table, class Ask>
CUresult named(Library& owner, uint64_t ownerId, Table& table, const char* name, Handle* out, Ask&& ask) {
  if (out == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(owner.mutex);
  for (auto& [known, id] : owner.kernels)
    if (known == name) {
      *out = fromId<Handle>(id);
      return CUDA_SUCCESS;
    }
  auto made = table.prepare();
  if (made.object == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  auto handle = fromId<Handle>(made.id);
  CUresult status = ask(&handle);
  if (status != CUDA_SUCCESS) {
    table.discard(made.id);
    return status;
  }
  made.object->library = ownerId;
  made.object->name = name;
  made.object->nameKnown = true;
  made.object->context = owner.context;
  made.object->life = owner.life;
  table.publish(made.id);
  owner.kernels.emplace_back(name, made.id);
  *out = handle;
  return CUDA_SUCCESS;
}

void forgetFunctions(Library& module) {
  std::lock_guard lock(module.mutex);
  for (auto& [name, id] : module.kernels) functions.destroy(id);
  module.kernels.clear();
}

// A library's kernels, their functions and its modules in every context.
void forgetKernels(Library& library) {
  std::lock_guard lock(library.mutex);
  for (auto& [name, id] : library.kernels) {
    if (auto kernel = kernels.pin(id)) {
      std::lock_guard ofKernel(kernel->mutex);
      for (auto& [life, function] : kernel->functions) functions.destroy(toId(function));
    }
    kernels.destroy(id);
  }
  for (auto& [life, module] : library.modules) modules.destroy(toId(module));
  library.kernels.clear();
  library.modules.clear();
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

// A module of a library has the library's kernels' functions.
static CUresult functionOfLibrary(const Library& module, const char* name, CUfunction* out) {
  if (out == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUkernel kernel = nullptr;
  CUresult status = custom::cuLibraryGetKernel(&kernel, module.library, name);
  Context* context = contexts().find(module.context);
  return status == CUDA_SUCCESS ? functionIn(*context, kernel, out) : status;
}

CUresult moduleIn(Context& context, CUlibrary library, CUmodule* out) {
  Library* owner = libraries.find(toId(library));
  if (owner == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const uint64_t life = context.id.load();
  std::lock_guard lock(owner->mutex);
  for (const auto& [known, module] : owner->modules)
    if (known == life) {
      *out = module;
      return CUDA_SUCCESS;
    }
  const auto made = modules.prepare();
  if (made.object == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  auto handle = fromId<CUmodule>(made.id);
  const CUresult status = Session::get().await<"cuLibraryGetModule">(context.handle, &handle, library);
  if (status != CUDA_SUCCESS) {
    modules.discard(made.id);
    return status;
  }
  made.object->context = context.handle;
  made.object->life = life;
  made.object->library = library;
  made.object->printing = owner->printing;
  modules.publish(made.id);
  owner->modules.emplace_back(life, handle);
  *out = handle;
  return CUDA_SUCCESS;
}

void forgetCode(CUcontext context) {
  std::vector<uint64_t> gone;
  modules.forEach([&](uint64_t id, Library& module) {
    if (module.context == context) gone.push_back(id);
  });
  for (uint64_t id : gone) modules.destroy(id);
  gone.clear();
  functions.forEach([&](uint64_t id, Function& function) {
    if (function.context == context) gone.push_back(id);
  });
  for (uint64_t id : gone) functions.destroy(id);
  libraries.forEach([&](uint64_t, Library& library) {
    std::lock_guard lock(library.mutex);
    std::erase_if(library.modules, [](auto& of) { return modules.find(toId(of.second)) == nullptr; });
  });
  kernels.forEach([&](uint64_t, Function& kernel) {
    std::lock_guard lock(kernel.mutex);
    std::erase_if(kernel.functions, [](auto& of) { return functions.find(toId(of.second)) == nullptr; });
  });
}

// Where the server has the code, a protected session names its pieces without the bytes: another server,
// where the session may go on, gets them then.
static CUresult offerImage(CUcontext context, std::span<const std::byte> bytes, const schema::ImageName& name,
                           unsigned& have) {
  Session& session = Session::get();
  CUresult status = session.await<"sessionImageOffer">(context, name, &have);
  std::shared_ptr<const CallLog::Code> kept;
  if (have != 0) {
    if (!session.isProtected()) return status;
    Dl_info file{};
    kept = session.keepCode(name, bytes, dladdr(bytes.data(), &file) != 0);
    if (kept == nullptr) return status;
  }
  for (size_t at = 0; status == CUDA_SUCCESS && at < bytes.size(); at += CallLog::kCodePiece) {
    const size_t n = have != 0 ? 0 : std::min(CallLog::kCodePiece, bytes.size() - at);
    status = session.post<"sessionImageData">(context, name, at,
                                              reinterpret_cast<const unsigned char*>(bytes.data() + at), n);
  }
  return status;
}

CUresult sendImage(CUcontext context, std::span<const std::byte> bytes, schema::ImageName& name) {
  name = nameOfImage(bytes);
  while (true) {
    const uint64_t moves = Session::get().moves();
    unsigned have = 0;
    const CUresult status = offerImage(context, bytes, name, have);
    // What one server has, the one where the session went on meanwhile may lack: pieces without bytes are
    // none there.
    if (status != CUDA_SUCCESS || have == 0 || Session::get().moves() == moves) return status;
  }
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
  if (owner->library != nullptr) return CUDA_ERROR_NOT_PERMITTED;  // it ends with its library
  CUcontext context = owner->context;
  forgetFunctions(*owner);
  forgetGlobals(*owner);
  if (!modules.destroy(toId(module))) return CUDA_ERROR_INVALID_HANDLE;
  return Session::get().await<"cuModuleUnload">(context, module);
}

CUresult cuModuleGetFunction(CUfunction* out, CUmodule module, const char* name) {
  Library* owner = modules.find(toId(module));
  if (owner == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (owner->library != nullptr) return functionOfLibrary(*owner, name, out);
  return named(*owner, toId(module), functions, name, out, [&](CUfunction* made) {
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
  forgetKernels(*owner);
  forgetGlobals(*owner);
  if (!libraries.destroy(toId(library))) return CUDA_ERROR_INVALID_HANDLE;
  return Session::get().await<"cuLibraryUnload">(CUcontext{nullptr}, library);
}
CUresult cuLibraryGetKernel(CUkernel* out, CUlibrary library, const char* name) {
  Library* owner = libraries.find(toId(library));
  if (owner == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return named(*owner, toId(library), kernels, name, out, [&](CUkernel* made) {
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
  return out == nullptr ? CUDA_ERROR_INVALID_VALUE : moduleIn(*context, library, out);
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

}  // namespace custom
}  // namespace gpupool::client
