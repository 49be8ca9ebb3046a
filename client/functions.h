#pragma once
// Kernels and functions. A library's kernel (CUkernel) works in every context and has a function (CUfunction)
// in each; a module's function belongs to the module's context. What is known of a kernel is one KernelState,
// shared by the kernel and its functions, because an attribute set through one handle may show through
// another.
//
// What was learnt in one context is never used in another, nor in a later life of the same context: it is
// kept under the context's version (contexts.h). All of it is forgotten when an attribute is set.

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "client/contexts.h"
#include "client/parameters.h"
#include "schema/session_calls.h"

namespace gpupool::client {

// Threads: any. The mutex is never held while a frame is awaited, so a host function may ask, too. Every list
// is bounded: a full one is emptied, and what it held is asked for again.
class KernelState {
 public:
  using Layout = std::vector<schema::ParameterLayout>;

  // The parameters: the same in every context, set once. False from setLayout: not a possible layout.
  bool laidOut() const { return laidOut_.load(std::memory_order_acquire); }
  bool setLayout(Layout layout);
  const Layout& layout() const { return layout_; }
  const ParameterPacker& packer() const { return packer_; }

  // Counts changes of attributes. Whoever asks the worker notes it before, and hands it back with the answer:
  // an answer from before a change is not kept.
  uint64_t revision() const { return revision_.load(std::memory_order_acquire); }
  void attributesChange();

  // Launches that the driver accepted once, by a hash of everything it judges (calls/launch.cpp): their
  // repeats may be posted (docs/design.md).
  bool accepted(uint64_t launch);
  void accept(uint64_t launch, uint64_t revision);

  // Attributes, by the version of the context and the handle they were asked with.
  struct Place {
    uint64_t version = 0;  // 0: is not kept
    uint64_t handle = 0;
    bool operator==(const Place&) const = default;
  };
  bool findInfo(const Place& place, schema::FunctionInfo& info);
  void keepInfo(const Place& place, const schema::FunctionInfo& info, uint64_t revision);

  // The last setting of an attribute: repeating it changes nothing. One set through another handle, or in
  // another context of the device, may have changed it, and takes its place.
  struct Setting {
    Place place;
    CUdevice device = 0;
    int attribute = 0;
    int value = 0;
  };
  bool isSet(const Setting& setting);
  void noteSetting(const Setting& setting);

  // Answers about occupancy.
  using Question = std::array<uint64_t, 5>;
  bool findAnswer(const Question& question, uint64_t& answer);
  void keepAnswer(const Question& question, uint64_t answer, uint64_t revision);

 private:
  static constexpr size_t kMost = 256;
  struct Info {
    Place place;
    schema::FunctionInfo info;
  };
  template <class T>
  static void add(std::vector<T>& list, const T& entry) {
    if (list.size() >= kMost) list.clear();
    list.push_back(entry);
  }

  std::atomic<bool> laidOut_{false};
  std::atomic<uint64_t> revision_{0};
  std::atomic<uint64_t> lastAccepted_{0};
  std::mutex mutex_;
  Layout layout_;
  ParameterPacker packer_;
  std::vector<uint64_t> accepted_;
  std::vector<Info> infos_;
  std::vector<Setting> settings_;
  std::vector<std::pair<Question, uint64_t>> answers_;
};

// Behind a CUkernel or a CUfunction.
struct Function {
  uint64_t library = 0;         // CUlibrary or CUmodule
  CUcontext context = nullptr;  // a function's; null for a kernel
  uint64_t life = 0;            // of that context (Context::id)
  CUkernel kernel = nullptr;    // a function's kernel; null for a module's function
  std::shared_ptr<KernelState> state = std::make_shared<KernelState>();

  std::mutex asking;  // held by the thread that asks for a kernel's function, and never by a host function
  std::mutex mutex;   // guards what follows
  std::string name;   // final once nameKnown is set
  std::atomic<bool> nameKnown{false};
  std::vector<std::pair<uint64_t, CUfunction>> functions;  // of a kernel, by life of the context
};

// Behind `handle`, which may be a CUkernel cast to a CUfunction. Null: neither.
Function* findFunction(CUfunction handle);

// The context that a call on the function works in: its own, or for a kernel the current one.
Context* homeOf(const Function& function, Context* current);
// The parameters' layout is known afterwards. context: where to ask, if it has to be asked; may be null.
CUresult describe(CUfunction handle, Function& function, const Context* context);
// Before a kernel is first used in `context`: the driver loads code in each context where it is used, and
// this has the load in the session's record, without which a rebuilt session has other variables there. The
// parameters' layout is known afterwards, too.
CUresult loadIn(const Context& context, CUfunction handle, Function& function);
// A function's attributes in its context; a kernel's on `device`, asked in `context`, which may be null.
CUresult functionInfo(CUfunction handle, Function& function, const Context* context, CUdevice device,
                      schema::FunctionInfo& info);
CUresult functionName(CUfunction handle, Function& function, CUcontext context, const char** name);
// The kernel's function in `context`.
CUresult functionIn(Context& context, CUkernel kernel, CUfunction* out);
// Before its first launch: from a launch on whose kernel may print, synchronising brings the output.
void notePrinting(const Function& function);

// A launch's or a kernel node's parameters as one packed buffer, from kernelParams or extra.
CUresult packParameters(CUfunction handle, void** kernelParams, void** extra, Context& context,
                        std::vector<std::byte>& out);

}  // namespace gpupool::client
