// Launches, events and graphs.

#include <chrono>
#include <memory>

#include "perf/cases.h"
#include "perf/driver.h"

namespace gpupool::perf {
namespace {

// Short enough that neither the driver's queue (1,020 launches) nor our credits make the caller wait.
constexpr unsigned kBurst = 256;
constexpr unsigned kMany = 10'000;
constexpr unsigned kGraphBurst = 16;

void work(std::chrono::nanoseconds time) {
  const auto until = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < until) {
  }
}

struct Event {
  Event() { ok(cuda().cuEventCreate(&handle, CU_EVENT_DEFAULT)); }
  ~Event() { cuda().cuEventDestroy(handle); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  CUevent handle = nullptr;
};

struct Graph {
  Graph(Gpu& gpu, unsigned nodes) {
    ok(cuda().cuStreamBeginCapture(gpu.stream(), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    for (unsigned i = 0; i < nodes; ++i) gpu.launchEmpty();
    ok(cuda().cuStreamEndCapture(gpu.stream(), &graph));
    ok(cuda().cuGraphInstantiate(&executable, graph, 0));
  }
  ~Graph() {
    cuda().cuGraphExecDestroy(executable);
    cuda().cuGraphDestroy(graph);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  CUgraph graph = nullptr;
  CUgraphExec executable = nullptr;
};

void addGraph(std::vector<Case>& cases, unsigned nodes) {
  const std::string name = "graph-" + std::to_string(nodes);
  cases.push_back({name + "-launch",
                   [=](Gpu& gpu) -> Steps {
                     auto graph = std::make_shared<Graph>(gpu, nodes);
                     return {{},
                             [&gpu, graph] { ok(cuda().cuGraphLaunch(graph->executable, gpu.stream())); },
                             [&gpu] { gpu.synchronize(); }};
                   },
                   kGraphBurst});
  cases.push_back({name + "-launch-synchronize", [=](Gpu& gpu) -> Steps {
                     auto graph = std::make_shared<Graph>(gpu, nodes);
                     return {{},
                             [&gpu, graph] {
                               ok(cuda().cuGraphLaunch(graph->executable, gpu.stream()));
                               gpu.synchronize();
                             },
                             {}};
                   }});
}

// What else the process has on the device can make the same graph slower. A second stream alone does not.
// Some eight memsets there, which are kernels, do: natively each of the graph's kernels then runs 0.2 us
// later.
struct OtherStream {
  explicit OtherStream(Gpu& gpu, bool filled) {
    ok(cuda().cuStreamCreate(&handle, CU_STREAM_NON_BLOCKING));
    ok(cuda().cuEventRecord(event.handle, handle));
    for (int i = 0; filled && i < kMemsets; ++i) {
      ok(cuda().cuMemsetD32Async(gpu.device(), 0, size_t{1} << 18, handle));
      ok(cuda().cuStreamSynchronize(handle));
    }
    for (unsigned i = 0; i < kBurst; ++i) gpu.launchEmpty();
    gpu.synchronize();
  }
  ~OtherStream() { cuda().cuStreamDestroy(handle); }
  OtherStream(const OtherStream&) = delete;
  OtherStream& operator=(const OtherStream&) = delete;
  static constexpr int kMemsets = 20;
  CUstream handle = nullptr;
  Event event;
};

void addGraphBesideStream(std::vector<Case>& cases, const std::string& which, bool filled) {
  cases.push_back({"graph-50-launch-synchronize-beside-" + which + "-stream", [=](Gpu& gpu) -> Steps {
                     auto other = std::make_shared<OtherStream>(gpu, filled);
                     auto graph = std::make_shared<Graph>(gpu, 50);
                     return {{},
                             [&gpu, graph, other] {
                               ok(cuda().cuGraphLaunch(graph->executable, gpu.stream()));
                               gpu.synchronize();
                             },
                             {}};
                   }});
}

}  // namespace

void addLaunchCases(std::vector<Case>& cases) {
  const auto settle = [](Gpu& gpu) { return [&gpu] { gpu.synchronize(); }; };
  cases.push_back({"launch",
                   [=](Gpu& gpu) -> Steps { return {{}, [&gpu] { gpu.launchEmpty(); }, settle(gpu)}; },
                   kBurst});
  cases.push_back({"launch-16-parameters",
                   [=](Gpu& gpu) -> Steps { return {{}, [&gpu] { gpu.launchSixteen(); }, settle(gpu)}; },
                   kBurst});
  cases.push_back({"launch-and-3us-of-work",
                   [=](Gpu& gpu) -> Steps {
                     return {{},
                             [&gpu] {
                               gpu.launchEmpty();
                               work(std::chrono::microseconds(3));
                             },
                             settle(gpu)};
                   },
                   kBurst});
  cases.push_back(
      {.name = "launches-10000",
       .make = [=](Gpu& gpu) -> Steps { return {{}, [&gpu] { gpu.launchEmpty(); }, settle(gpu)}; },
       .operations = kMany,
       .timesAfter = true});
  cases.push_back({"launch-synchronize", [](Gpu& gpu) -> Steps {
                     return {{},
                             [&gpu] {
                               gpu.launchEmpty();
                               gpu.synchronize();
                             },
                             {}};
                   }});
  cases.push_back({"synchronize-idle-stream",
                   [=](Gpu& gpu) -> Steps { return {{}, [&gpu] { gpu.synchronize(); }, {}}; }, kBurst});
  cases.push_back(
      {"query-idle-stream",
       [=](Gpu& gpu) -> Steps { return {{}, [&gpu] { ok(cuda().cuStreamQuery(gpu.stream())); }, {}}; },
       kBurst});
}

void addEventCases(std::vector<Case>& cases) {
  cases.push_back({"event-record",
                   [](Gpu& gpu) -> Steps {
                     auto event = std::make_shared<Event>();
                     return {{},
                             [&gpu, event] { ok(cuda().cuEventRecord(event->handle, gpu.stream())); },
                             [&gpu] { gpu.synchronize(); }};
                   },
                   kBurst});
  cases.push_back({"event-query",
                   [](Gpu& gpu) -> Steps {
                     auto event = std::make_shared<Event>();
                     ok(cuda().cuEventRecord(event->handle, gpu.stream()));
                     gpu.synchronize();
                     return {{}, [event] { ok(cuda().cuEventQuery(event->handle)); }, {}};
                   },
                   kBurst});
  cases.push_back({"event-elapsed",
                   [](Gpu& gpu) -> Steps {
                     auto from = std::make_shared<Event>(), to = std::make_shared<Event>();
                     ok(cuda().cuEventRecord(from->handle, gpu.stream()));
                     gpu.launchEmpty();
                     ok(cuda().cuEventRecord(to->handle, gpu.stream()));
                     gpu.synchronize();
                     return {{},
                             [from, to] {
                               float time = 0;
                               ok(cuda().cuEventElapsedTime(&time, from->handle, to->handle));
                             },
                             {}};
                   },
                   kGraphBurst});
  // What a program that times its kernels does: new records each time, so nothing can be remembered.
  cases.push_back({"event-record-launch-record-elapsed", [](Gpu& gpu) -> Steps {
                     auto from = std::make_shared<Event>(), to = std::make_shared<Event>();
                     return {{},
                             [&gpu, from, to] {
                               float time = 0;
                               ok(cuda().cuEventRecord(from->handle, gpu.stream()));
                               gpu.launchEmpty();
                               ok(cuda().cuEventRecord(to->handle, gpu.stream()));
                               ok(cuda().cuEventSynchronize(to->handle));
                               ok(cuda().cuEventElapsedTime(&time, from->handle, to->handle));
                             },
                             {}};
                   }});
}

void addGraphCases(std::vector<Case>& cases) {
  addGraph(cases, 1);
  addGraph(cases, 50);
  addGraphBesideStream(cases, "used", false);
}

void addLastCases(std::vector<Case>& cases) { addGraphBesideStream(cases, "filled", true); }

}  // namespace gpupool::perf
