#pragma once
// The seam inside the software GPU: below it PTX becomes machine code and runs (ptx/, codegen/, runtime/);
// above it the driver API keeps contexts, streams, memory and modules (api/). No cu* type crosses it.
//
// Device memory is ordinary memory of this process at the addresses the API chose. What kernels may touch at
// all is decided by a table of 1 TiB granules (`Visibility`): an address outside every marked granule, or a
// fault inside one, ends the grid with Outcome::illegalAddress. Shared and local memory lie in marked
// granules too, so a generic address is a plain address.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gpupool::softgpu {

// ---- address space ----
// Marks [address,
// address + bytes) visible to kernels (counted per granule; unmark undoes one mark).
void markVisible(uint64_t address, uint64_t bytes);
void unmarkVisible(uint64_t address, uint64_t bytes);

// ---- code ----
struct Parameter {
  uint32_t offset = 0;  // in the packed parameter buffer
  uint32_t size = 0;
  uint32_t alignment = 1;
};

struct KernelInfo {
  std::string name;
  std::vector<Parameter> parameters;
  uint32_t parameterBytes = 0;
  uint32_t staticSharedBytes = 0;
  uint32_t localBytes = 0;     // per thread
  uint32_t constantBytes = 0;  // of its module
  uint32_t maxThreads = 1024;  // .maxntid or 1024
  uint32_t registers = 32;     // an estimate: nothing here allocates registers
  uint32_t ptxVersion = 0;     // 75 for sm_75
};

struct GlobalInfo {
  std::string name;
  uint64_t size = 0;
  uint32_t alignment = 1;
  bool constant = false;
  bool managed = false;   // .attribute(.managed)
  bool external = false;  // declared .extern, to be resolved by linking
  uint64_t address = 0;   // after placement
};

class Kernel;  // code of one .entry; owned by its Program

struct CompileError {
  enum class Kind { syntax, unsupported, unresolved } kind = Kind::syntax;
  std::string text;  // for the JIT log: file position, the instruction, what is wrong
};

// One loaded module. Immutable once loaded; kernels may run on any thread. Destroy only when none runs.
class Program {
 public:
  virtual ~Program() = default;
  virtual std::span<const KernelInfo> kernels() const = 0;
  virtual std::span<const GlobalInfo> globals() const = 0;
  virtual const Kernel* kernel(std::string_view name) const = 0;  // null if there is none
};

// Places a global: returns device memory of that size and alignment (zeroed), or 0 when out of memory.
using PlaceGlobal = std::function<uint64_t(const GlobalInfo&)>;

// Parses and checks `sources` (PTX texts; several are linked: .extern declarations meet .visible definitions)
// and compiles them; code generation for a kernel may be delayed to its first launch. Places and initialises
// globals. Null on error, with `error` filled. Any thread.
std::unique_ptr<Program> load(std::span<const std::string_view> sources, const PlaceGlobal& place,
                              CompileError& error);

// ---- running ----
enum class Outcome {
  ok,
  illegalAddress,      // CUDA_ERROR_ILLEGAL_ADDRESS
  misalignedAddress,   // CUDA_ERROR_MISALIGNED_ADDRESS
  illegalInstruction,  // CUDA_ERROR_ILLEGAL_INSTRUCTION
  assertion,           // CUDA_ERROR_ASSERT
  launchFailed,        // trap, or a barrier that can never be met: CUDA_ERROR_LAUNCH_FAILED
  outOfMemory,
};

struct Launch {
  const Kernel* kernel = nullptr;
  uint32_t grid[3] = {1, 1, 1};
  uint32_t block[3] = {1, 1, 1};
  uint32_t dynamicSharedBytes = 0;
  std::span<const std::byte> parameters;  // packed, KernelInfo::parameterBytes long
  bool cooperative = false;               // every block resident at once; grid-wide barrier available
  int device = 0;
  uint64_t printfBuffer = 0;  // the context's Output, below
};

// Compiles now what the first run() of the kernel would; false if that failed (the log says why). Any thread.
bool prepare(const Kernel& kernel);

// Runs the grid on the shared thread pool and returns when it is done. Called by stream threads; several
// grids may run at once, sharing the cores.
Outcome run(const Launch& launch);

// The occupancy the software GPU claims: resident blocks per multiprocessor.
uint32_t residentBlocks(const KernelInfo& kernel, uint32_t blockThreads, uint32_t dynamicSharedBytes);

// Kernel printf and assert text since the last call, in order of arrival; the API writes it to stdout at the
// synchronisation points where the driver would.
std::string takeOutput();

// ---- conditions of graphs ----
// A condition is a number that kernels set (cudaGraphSetConditional) and that decides which part of a graph
// runs. The handle is what kernels get as a parameter. Any thread; kernels set without waiting.
uint64_t createCondition();  // 0: there are too many
void destroyCondition(uint64_t handle);
void setCondition(uint64_t handle, uint32_t value);  // no effect on a condition that is gone
uint32_t conditionValue(uint64_t handle);            // 0 of one that is gone

// Device heap (malloc in kernels): its limit, and the bytes in use, for cuCtxGetLimit and the record.
void setHeapLimit(uint64_t bytes);
uint64_t heapBytesInUse();

// ---- textures and surfaces: implemented above the seam, called by generated code ----
// `object` is the value kernels received as CUtexObject / CUsurfObject.
// Coordinates as in PTX (tex / sust).
struct TextureFetch {
  enum class Geometry : uint8_t { d1, d2, d3, a1, a2, cube, acube, linear1 } geometry = Geometry::d2;
  bool integerCoordinates = false;
  bool integerResult = false;  // .u32/.s32 result: raw bits; otherwise f32
  float coordinate[3] = {};
  int32_t integerCoordinate[3] = {};
  int32_t layer = 0;
  float lod = 0;
};
// Writes four 32-bit results; false: not a live object (illegal address).
bool fetchTexture(uint64_t object, const TextureFetch& fetch, uint32_t result[4]);
// sust.b / suld.b: `x` in bytes, element `bytes` wide; clamp mode 0 trap, 1 clamp, 2 zero. False: trap.
bool surfaceStore(uint64_t object, int dimensions, int32_t x, int32_t y, int32_t z, const void* data,
                  uint32_t bytes, int clampMode);
bool surfaceLoad(uint64_t object, int dimensions, int32_t x, int32_t y, int32_t z, void* data, uint32_t bytes,
                 int clampMode);

}  // namespace gpupool::softgpu
