#include "server/worker/contents.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "schema/array_format.h"
#include "server/arena_mmap.h"
#include "server/worker/device_stream.h"
#include "server/worker/hindrances.h"

namespace gpupool::server {
namespace {

bool findManaged(Session& session, uint64_t owner, const std::string& name, CUdeviceptr& address,
                 size_t& bytes) {
  CUlibrary library = nullptr;
  PlaceGlobals place;
  return handles::kindOf(owner) == HandleKind::library && session.objects().find(owner, library) &&
         session.driver().cuLibraryGetManaged(&address, &bytes, library, name.c_str()) == CUDA_SUCCESS &&
         bytes != 0;
}

void findVariables(Session& session, std::vector<Variable>& found) {
  for (const LoadedCode& code : loadedCode(session)) {
    // It may have ended.
    if (code.contents == nullptr || session.makeCurrentAgain(code.context) != CUDA_SUCCESS) continue;
    for (const fatbin::Symbol& symbol : code.contents->variables) {
      Variable variable{code.owner, code.context, symbol.name, 0, 0};
      if (findVariable(session, code.owner, symbol.name, variable.address, variable.bytes))
        found.push_back(variable);
    }
  }
  for (const LoadedCode& code : unloadedManaged(session)) {
    if (code.contents == nullptr) continue;
    for (const fatbin::Symbol& symbol : code.contents->variables) {
      Variable variable{code.owner, 0, symbol.name, 0, 0};
      if (findManaged(session, code.owner, symbol.name, variable.address, variable.bytes))
        found.push_back(variable);
    }
  }
}

std::string findArrays(Session& session, std::vector<ArrayState>& found) {
  for (const auto kind : {HandleKind::array, HandleKind::mipmap})
    for (const auto& [id, entry] : session.record().living(kind)) {
      ArrayState state{id, entry.frame.context, 0, 0};
      if (session.makeCurrentAgain(state.context) != CUDA_SUCCESS) return "an array's context has ended";
      if (kind == HandleKind::mipmap && entry.arguments.size() >= 8) {  // the last argument
        uint64_t levels = 0;
        std::memcpy(&levels, entry.arguments.data() + entry.arguments.size() - 8, sizeof levels);
        state.levels = static_cast<unsigned>(std::min<uint64_t>(levels, 32));
      }
      for (CUarray level : levelsOf(session.driver(), session.objects(), id, state.levels)) {
        const uint64_t bytes = arrayBytes(session.driver(), level);
        if (bytes == 0) return "an array of the program cannot be copied";
        state.bytes += bytes;
      }
      found.push_back(state);
    }
  return "";
}

// Two workers that have the same one share it.
Checksum identityOf(const transport::SharedMemory& memory) {
  struct stat file{};
  fstat(memory.descriptor(), &file);
  const uint64_t words[] = {file.st_dev, file.st_ino, memory.size()};
  return checksumOf(std::as_bytes(std::span(words)));
}

std::string cannotRead(Session& session, const Variable& variable, CUresult status) {
  return "variable " + variable.name + " cannot be read: " + session.driver().describe(status);
}

std::string nameOf(const Variable& variable) {
  return "variable " + variable.name + " of " + hex(variable.owner);
}

std::string readVariable(Session& session, const Variable& variable, const TakeContent& take) {
  std::vector<std::byte> bytes(variable.bytes);
  CUresult status = session.makeCurrentAgain(variable.context);
  if (variable.context == 0)
    std::memcpy(bytes.data(), reinterpret_cast<const void*>(variable.address), bytes.size());
  else if (status == CUDA_SUCCESS)
    status = session.driver().cuMemcpyDtoH_v2(bytes.data(), variable.address, bytes.size());
  return status == CUDA_SUCCESS ? take(nameOf(variable), bytes) : cannotRead(session, variable, status);
}

// The first of them, and those behind it that are in the same context and fit into its hasher's pinned
// memory: they are waited for once. A program has hundreds.
std::string readVariables(Session& session, std::span<const Variable>& rest, const TakeContent& take) {
  const Variable& first = rest.front();
  CUcontext real = nullptr;
  PageHasher* hasher = nullptr;
  if (first.context != 0 && session.objects().find(first.context, real))
    hasher = session.hashers().find(real);
  if (hasher == nullptr || first.bytes > hasher->pinned().size()) {
    std::string why = readVariable(session, first, take);
    rest = rest.subspan(1);
    return why;
  }
  CUresult status = session.makeCurrentAgain(first.context);
  std::span<std::byte> room = hasher->pinned();
  size_t count = 0;
  for (; status == CUDA_SUCCESS && count < rest.size(); ++count) {
    const Variable& next = rest[count];
    if (next.context != first.context || next.bytes > room.size()) break;
    status = session.driver().cuMemcpyDtoHAsync_v2(room.data(), next.address, next.bytes, hasher->stream());
    room = room.subspan(next.bytes);
  }
  const CUresult finished = session.driver().cuStreamSynchronize(hasher->stream());
  if (status == CUDA_SUCCESS) status = finished;
  if (status != CUDA_SUCCESS) return cannotRead(session, first, status);
  room = hasher->pinned();
  std::string why;
  for (const Variable& variable : rest.first(count)) {
    if (why.empty()) why = take(nameOf(variable), room.first(variable.bytes));
    room = room.subspan(variable.bytes);
  }
  rest = rest.subspan(count);
  return why;
}

}  // namespace

std::string hex(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

std::string findContents(Session& session, Contents& contents) {
  findVariables(session, contents.variables);
  return findArrays(session, contents.arrays);
}

std::string readContents(Session& session, const Contents& contents, const TakeContent& take) {
  const Driver& driver = session.driver();
  std::string why;
  for (std::span<const Variable> rest(contents.variables); !rest.empty() && why.empty();)
    why = readVariables(session, rest, take);
  if (!why.empty()) return why;
  std::vector<std::byte> bytes;
  for (const ArrayState& array : contents.arrays) {
    bytes.resize(array.bytes);
    CUresult status = session.makeCurrentAgain(array.context);
    size_t at = 0;
    for (CUarray level : levelsOf(driver, session.objects(), array.id, array.levels)) {
      const size_t part = arrayBytes(driver, level);
      if (status == CUDA_SUCCESS) status = copyArray(driver, level, std::span(bytes).subspan(at, part), true);
      at += part;
    }
    if (status != CUDA_SUCCESS) return "an array cannot be read: " + driver.describe(status);
    if (std::string why = take("array " + hex(array.id), bytes); !why.empty()) return why;
  }
  return "";
}

std::string contentDigests(Session& session, const Contents& contents, HostDigests hostBy, Digests& digests) {
  std::string why =
      readContents(session, contents, [&](const std::string& name, std::span<const std::byte> bytes) {
        digests[name] = checksumOf(bytes);
        return "";
      });
  if (!why.empty()) return why;
  const auto host = [&](const std::string& name, const transport::SharedMemory& memory, size_t from = 0) {
    if (hostBy == HostDigests::ofIdentity) digests[name] = identityOf(memory);
    if (hostBy == HostDigests::ofBytes)
      digests[name] = checksumOf(std::span(memory.data(), memory.size()).subspan(from));
  };
  host(kWordsDigest, *session.views().words(),
       schema::kWordsOffset);  // the bell before them is rung at any time
  host("staging memory", *session.views().staging());
  for (const auto& [address, memory] : session.space().hostPieces())
    host("pinned memory at " + hex(address), *memory);
  std::vector<Checksum> parts;
  why = DeviceStream(session).read(parts);
  for (size_t i = 0; i < parts.size(); ++i) digests["device memory, part " + std::to_string(i)] = parts[i];
  return why;
}

uint64_t arrayBytes(const Driver& driver, CUarray array) {
  CUDA_ARRAY3D_DESCRIPTOR_v2 shape{};
  if (driver.cuArray3DGetDescriptor_v2(&shape, array) != CUDA_SUCCESS || !canBeCopied(shape)) return 0;
  return shape.Width * schema::arrayElementBytes(shape.Format, shape.NumChannels) *
         std::max<size_t>(shape.Height, 1) * std::max<size_t>(shape.Depth, 1);
}

CUresult copyArray(const Driver& driver, CUarray array, std::span<std::byte> bytes, bool out) {
  CUDA_ARRAY3D_DESCRIPTOR_v2 shape{};
  const CUresult status = driver.cuArray3DGetDescriptor_v2(&shape, array);
  if (status != CUDA_SUCCESS) return status;
  CUDA_MEMCPY3D_v2 copy{};
  copy.WidthInBytes = shape.Width * schema::arrayElementBytes(shape.Format, shape.NumChannels);
  copy.Height = std::max<size_t>(shape.Height, 1);
  copy.Depth = std::max<size_t>(shape.Depth, 1);
  if (copy.WidthInBytes * copy.Height * copy.Depth != bytes.size()) return CUDA_ERROR_INVALID_VALUE;
  (out ? copy.srcMemoryType : copy.dstMemoryType) = CU_MEMORYTYPE_ARRAY;
  (out ? copy.dstMemoryType : copy.srcMemoryType) = CU_MEMORYTYPE_HOST;
  (out ? copy.srcArray : copy.dstArray) = array;
  if (out)
    copy.dstHost = bytes.data();
  else
    copy.srcHost = bytes.data();
  (out ? copy.dstPitch : copy.srcPitch) = copy.WidthInBytes;
  (out ? copy.dstHeight : copy.srcHeight) = copy.Height;
  return driver.cuMemcpy3D_v2(&copy);
}

std::vector<CUarray> levelsOf(const Driver& driver, Objects& objects, uint64_t id, unsigned levels) {
  std::vector<CUarray> all;
  CUmipmappedArray mipmap = nullptr;
  CUarray array = nullptr;
  if (levels == 0) {
    if (objects.find(id, array)) all.push_back(array);
    return all;
  }
  if (!objects.find(id, mipmap)) return all;
  for (unsigned level = 0; level < levels; ++level)
    if (driver.cuMipmappedArrayGetLevel(&array, mipmap, level) == CUDA_SUCCESS) all.push_back(array);
  return all;
}

bool findVariable(Session& session, uint64_t owner, const std::string& name, CUdeviceptr& address,
                  size_t& bytes) {
  CUmodule module = nullptr;
  CUlibrary library = nullptr;
  const Driver& driver = session.driver();
  {
    PlaceGlobals place;
    if (handles::kindOf(owner) == HandleKind::module)
      return session.objects().find(owner, module) &&
             driver.cuModuleGetGlobal_v2(&address, &bytes, module, name.c_str()) == CUDA_SUCCESS &&
             bytes != 0;
    if (!session.objects().find(owner, library)) return false;
    if (driver.cuLibraryGetGlobal(&address, &bytes, library, name.c_str()) == CUDA_SUCCESS) return bytes != 0;
  }
  return findManaged(session, owner, name, address, bytes);
}

}  // namespace gpupool::server
