// The same calls give the same addresses and values in another process, and on another device: a session that
// is rebuilt elsewhere finds in its memory what it put there. The other processes are this program again.
#include <cuda.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

#define MUST(condition)                                                    \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: " #condition "\n", __FILE__, __LINE__); \
      _exit(1);                                                            \
    }                                                                      \
  } while (false)
#define MUST_DO(call) MUST((call) == CUDA_SUCCESS)

// Variables and a pointer to a function, under the names that `tag` ends.
std::string code(const std::string& tag, unsigned bytes) {
  return ".version 7.0\n.target sm_75\n.address_size 64\n"
         ".func (.reg .b32 r) f" +
         tag +
         "(.reg .b32 x) { mov.b32 r, x; ret; }\n"
         ".global .b8 data" +
         tag + "[" + std::to_string(bytes) +
         "];\n"
         ".const .align 8 .b8 table" +
         tag +
         "[72];\n"
         ".global .attribute(.managed) .b64 managed" +
         tag +
         ";\n"
         ".global .b64 pointer" +
         tag + "[2] = {f" + tag + ", data" + tag +
         "};\n"
         ".visible .entry k" +
         tag + "() { ret; }\n";
}

void show(const char* what, uint64_t value) {
  std::printf("%s %llx\n", what, static_cast<unsigned long long>(value));
}

void showModule(CUmodule module, const std::string& tag) {
  for (const char* kind : {"data", "table", "managed", "pointer"}) {
    CUdeviceptr address = 0;
    MUST_DO(cuModuleGetGlobal(&address, nullptr, module, (kind + tag).c_str()));
    show((kind + tag).c_str(), address);
    if (std::strcmp(kind, "pointer") != 0) continue;
    uint64_t pointers[2] = {};
    MUST_DO(cuMemcpyDtoH(pointers, address, sizeof pointers));
    show("  to a function", pointers[0]);
    show("  to a variable", pointers[1]);
  }
}

CUmodule load(const std::string& tag, unsigned bytes) {
  CUmodule module = nullptr;
  MUST_DO(cuModuleLoadData(&module, code(tag, bytes).c_str()));
  showModule(module, tag);
  return module;
}

CUlibrary library(const std::string& tag, unsigned bytes) {
  CUlibrary made = nullptr;
  MUST_DO(cuLibraryLoadData(&made, code(tag, bytes).c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0));
  return made;
}

void showLibrary(CUlibrary library, const std::string& tag) {
  CUmodule module = nullptr;
  MUST_DO(cuLibraryGetModule(&module, library));
  showModule(module, tag);
}

void modules() {
  CUmodule first = load("A", 1000);
  load("B", 3 << 20);
  MUST_DO(cuModuleUnload(first));
  load("C", 100);
  load("D", 5000);
  showLibrary(library("E", 700), "E");
}

CUtexObject texture(CUdeviceptr memory) {
  CUDA_RESOURCE_DESC resource{};
  resource.resType = CU_RESOURCE_TYPE_LINEAR;
  resource.res.linear = {memory, CU_AD_FORMAT_FLOAT, 1, 4096};
  CUDA_TEXTURE_DESC how{};
  CUtexObject made = 0;
  MUST_DO(cuTexObjectCreate(&made, &resource, &how, nullptr));
  show("texture", made);
  return made;
}

CUsurfObject surface(CUarray array) {
  CUDA_RESOURCE_DESC resource{};
  resource.resType = CU_RESOURCE_TYPE_ARRAY;
  resource.res.array.hArray = array;
  CUsurfObject made = 0;
  MUST_DO(cuSurfObjectCreate(&made, &resource));
  show("surface", made);
  return made;
}

void objects() {
  CUdeviceptr memory = 0;
  MUST_DO(cuMemAlloc(&memory, 4096));
  const CUtexObject first = texture(memory), second = texture(memory);
  // As natively: the lowest that is free.
  MUST(first == 1 && second == 2);
  MUST_DO(cuTexObjectDestroy(second));
  MUST(texture(memory) == 2);
  MUST(texture(memory) == 3);
  MUST_DO(cuTexObjectDestroy(first));
  MUST(texture(memory) == 1);
  CUDA_ARRAY3D_DESCRIPTOR shape{16, 16, 0, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_SURFACE_LDST};
  CUarray array = nullptr;
  MUST_DO(cuArray3DCreate(&array, &shape));
  const CUsurfObject one = surface(array);
  surface(array);
  MUST_DO(cuSurfObjectDestroy(one));
  MUST(surface(array) == one);
}

CUgraph conditions(CUcontext context, int count) {
  CUgraph graph = nullptr;
  MUST_DO(cuGraphCreate(&graph, 0));
  for (; count > 0; --count) {
    CUgraphConditionalHandle made = 0;
    MUST_DO(cuGraphConditionalHandleCreate(&made, graph, context, 0, 0));
    show("condition", made);
  }
  return graph;
}

void session(int device) {
  CUcontext context = nullptr;
  MUST_DO(cuInit(0));
  const CUlibrary early = library("F", 900);  // of no device yet
  size_t before = 0, after = 0, bytes = 0;
  MUST_DO(cuDevicePrimaryCtxRetain(&context, device));
  MUST_DO(cuCtxSetCurrent(context));
  MUST_DO(cuMemGetInfo(&before, &bytes));
  showLibrary(early, "F");
  MUST_DO(cuMemGetInfo(&after, &bytes));
  MUST(device == 0 || after < before);  // its variables are on the device that has its first context
  modules();
  objects();
  CUgraph graph = conditions(context, 3);
  conditions(context, 1);
  MUST_DO(cuGraphDestroy(graph));
  conditions(context, 4);
}

// What this program prints as another process that uses that device.
std::string another(int device) {
  char self[4096] = {};
  MUST(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
  FILE* pipe = popen(("'" + std::string(self) + "' " + std::to_string(device)).c_str(), "r");
  MUST(pipe != nullptr);
  std::string text;
  char line[256];
  while (std::fgets(line, sizeof line, pipe) != nullptr) text += line;
  MUST(pclose(pipe) == 0);
  return text;
}

}  // namespace

int main(int count, char** words) {
  if (count > 1) {
    session(std::atoi(words[1]));
    return 0;
  }
  MUST(setenv("GPUPOOL_SOFT_DEVICES", "2", 1) == 0);
  const std::string once = another(0);
  MUST(once.size() > 500);
  for (const int device : {0, 1}) {
    const std::string again = another(device);
    if (once == again) continue;
    std::fprintf(stderr, "once:\n%s\nagain, on device %d:\n%s", once.c_str(), device, again.c_str());
    return 1;
  }
  return 0;
}
