// The coverage report: every function of the driver library and how it is answered, in the words of its row
// (schema/rows.h). Linked with the client's own objects, so it tells what is there, not what was planned. A
// function whose row or policy is missing is "not supported": it logs its name once and returns
// CUDA_ERROR_NOT_SUPPORTED.
//   call-coverage [--totals]

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "client/devices.h"
#include "client/exports.h"
#include "schema/rows.h"

namespace {

using namespace gpupool;
using schema::Client;
using schema::Worker;

// What a row says.
struct Words {
  std::string_view name;
  Client client;
  Worker worker;
  std::string flags;
  bool session = false;
};

template <class R>
Words wordsOf(bool session) {
  Words words{R::name.view(), R::client, R::worker, "", session};
  for (auto [set, flag] : {std::pair{R::beforeInit, "BeforeInit"},
                           {R::inHostFunction, "InHostFunction"},
                           {R::cleanup, "Cleanup"},
                           {R::beside, "Beside"},
                           {R::aside, "Aside"},
                           {R::recorded, "Recorded"}})
    if (set) words.flags += std::string(words.flags.empty() ? "" : " ") + flag;
  return words;
}

// The name whose row an export stands on: its own, or that of the default-stream variants' base.
consteval std::string_view withoutSuffix(std::string_view symbol) {
  for (std::string_view suffix : {"_ptsz", "_ptds"})
    if (symbol.ends_with(suffix)) return symbol.substr(0, symbol.size() - suffix.size());
  return symbol;
}

const std::vector<Words>& rows() {
  static const std::vector<Words> all = {
#define CALL(function, ...) wordsOf<schema::RowOf<#function>>(false),
#define SESSION_CALL(function, ...) wordsOf<schema::RowOf<#function>>(true),
#include "schema/calls/all.h"
#undef CALL
#undef SESSION_CALL
  };
  return all;
}

const Words* rowNamed(std::string_view name) {
  const auto at =
      std::find_if(rows().begin(), rows().end(), [&](const Words& row) { return row.name == name; });
  return at == rows().end() ? nullptr : &*at;
}

const char* nameOf(Client way) {
  switch (way) {
    case Client::Local:
      return "Local";
    case Client::Post:
      return "Post";
    case Client::Await:
      return "Await";
    default:
      return "Policy";
  }
}
const char* nameOf(Worker way) {
  switch (way) {
    case Worker::None:
      return "None";
    case Worker::Generated:
      return "Generated";
    default:
      return "Checked";
  }
}

constexpr char kNotSupported[] = "not supported";

// How many rows say what: ways of the client by ways of the worker, and each flag.
void printRows() {
  constexpr Client clients[] = {Client::Local, Client::Post, Client::Await, Client::Policy};
  constexpr Worker workers[] = {Worker::None, Worker::Generated, Worker::Checked};
  std::map<std::string, int> flags;
  for (bool session : {false, true}) {
    std::printf("\n%-28s", session ? "rows of the session's calls" : "rows of driver functions");
    for (Worker worker : workers) std::printf(" %10s", nameOf(worker));
    std::printf("\n");
    for (Client client : clients) {
      std::printf("  %-26s", nameOf(client));
      for (Worker worker : workers)
        std::printf(" %10d",
                    static_cast<int>(std::count_if(rows().begin(), rows().end(), [&](const Words& row) {
                      return row.session == session && row.client == client && row.worker == worker;
                    })));
      std::printf("\n");
    }
  }
  for (const Words& row : rows()) {
    std::istringstream in(row.flags);
    for (std::string flag; in >> flag;) ++flags[flag];
  }
  std::printf("\nrows with a flag\n");
  for (const auto& [flag, count] : flags) std::printf("  %-26s %10d\n", flag.c_str(), count);
}

// What the pool cannot keep must not be promised (client/devices.h). The first attribute that would be.
const char* passedThrough() {
  static constexpr std::pair<CUdevice_attribute, const char*> kAbsent[] = {
      {CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, "multicast"},
      {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, "fabric handles"},
      {CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, "DMA-BUF"},
      {CU_DEVICE_ATTRIBUTE_HOST_ALLOC_DMA_BUF_SUPPORTED, "DMA-BUF of host memory"},
      {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, "GPUDirect RDMA"},
      {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, "GPUDirect RDMA of mapped memory"},
      {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS, "flushing of GPUDirect RDMA writes"},
      {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, "ordering of GPUDirect RDMA writes"},
  };
  for (auto [attribute, name] : kAbsent)
    if (!client::notInThePool(attribute)) return name;
  return nullptr;
}

}  // namespace

int main(int count, char** words) {
  const bool all = count < 2 || std::strcmp(words[1], "--totals") != 0;
  static constexpr std::pair<const char*, std::string_view> kNames[] = {
#define NAME(name) {#name, withoutSuffix(#name)},
#include "schema/names.def"
#undef NAME
  };
  std::map<std::string_view, int> totals;
  for (const client::Export& entry : client::exports()) {
    const auto named = std::find_if(std::begin(kNames), std::end(kNames),
                                    [&](const auto& one) { return std::strcmp(one.first, entry.name) == 0; });
    if (named == std::end(kNames)) {
      std::fprintf(stderr, "%s is exported, but no name of the driver's\n", entry.name);
      return 1;
    }
    const Words* row = rowNamed(entry.name);
    if (row == nullptr) row = rowNamed(named->second);
    if (!entry.supported || row == nullptr) {
      ++totals[kNotSupported];
      if (all) std::printf("%-23s %s\n", kNotSupported, entry.name);
      continue;
    }
    // multicast_test.sh says why.
    if (named->second.starts_with("cuMulticast")) {
      std::fprintf(stderr, "%s must have no row\n", entry.name);
      return 1;
    }
    ++totals[nameOf(row->client)];
    if (all)
      std::printf("%-13s %-9s %s%s%s\n", nameOf(row->client), nameOf(row->worker), entry.name,
                  row->flags.empty() ? "" : "  ", row->flags.c_str());
  }
  if (const char* passed = passedThrough(); passed != nullptr) {
    std::fprintf(stderr, "the pool has no %s, but the attribute is the device's\n", passed);
    return 1;
  }
  int sum = 0, supported = 0;
  for (const char* kind : {"Local", "Post", "Await", "Policy", kNotSupported}) {
    std::printf("%s%-13s %d\n", sum == 0 && all ? "\n" : "", kind, totals[kind]);
    sum += totals[kind];
    if (kind != kNotSupported) supported += totals[kind];
  }
  std::printf("%-13s %d, %d supported\n", "functions", sum, supported);
  printRows();
  return sum == static_cast<int>(std::size(kNames)) ? 0 : 1;
}
