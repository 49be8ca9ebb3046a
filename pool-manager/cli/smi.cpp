// gpupool smi: the GPUs of the lease that this process runs in, as nvidia-smi shows a machine's. It is a
// program like any other: what it says, our libnvidia-ml.so.1 says.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <thread>

#include "base/options.h"
#include "pool-manager/cli/command.h"
#include "pool-manager/cli/places.h"
#include "pool-manager/cli/smi_fields.h"

namespace gpupool::cli {
namespace {

// As nvidia-smi's.
constexpr int kExitNoDriver = 9, kExitNotFound = 6;

const Help kSmiHelp = {
    "gpupool smi [options]",
    "Shows the GPUs of a lease, inside `gpupool run`, with nvidia-smi's words: load, memory, temperature, "
    "power and "
    "clocks, as the GPUs' server sees them now. Without options a table. `gpupool devices -v` shows all GPUs "
    "of the "
    "pool.",
    "GPUPOOL_HOLDER: set by `gpupool run`. GPUPOOL_LIBRARY_DIR: the folder of libnvidia-ml.so.1, instead of "
    "the one "
    "beside this tool.",
    "0: success. 2: the command line is wrong. 6: there is no such GPU. 9: there is no lease here, or its "
    "holder or "
    "server does not answer.",
    "  gpupool run -- gpupool smi\n"
    "  gpupool smi -L\n"
    "  gpupool smi --query-gpu=index,utilization.gpu,memory.used --format=csv,noheader,nounits -l 1\n"};

struct Request {
  bool list = false, queryGpus = false, queryApps = false, helpFields = false;
  bool csv = false, header = true, units = true;
  std::vector<std::string> fields, ids;
  std::chrono::milliseconds loop{0};  // 0: once
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) {
    part.erase(0, part.find_first_not_of(' '));
    part.erase(part.find_last_not_of(' ') + 1);
    parts.push_back(part);
  }
  return parts;
}

[[noreturn]] void usage(const std::string& text) { throw CommandError(kExitUsage, "smi: " + text); }

std::chrono::milliseconds interval(const std::string& text, uint32_t unit) {
  uint64_t number = 0;
  try {
    size_t end = 0;
    number = std::stoull(text, &end);
    if (end != text.size() || text[0] == '-') number = 0;
  } catch (const std::exception&) {
    number = 0;
  }
  if (number == 0 || number > 1'000'000'000) usage("'" + text + "' is no interval");
  return std::chrono::milliseconds(number * unit);
}

void readFormat(Request& request, const std::string& text) {
  for (const std::string& word : split(text)) {
    if (word == "csv") {
      request.csv = true;
    } else if (word == "noheader") {
      request.header = false;
    } else if (word == "nounits") {
      request.units = false;
    } else {
      usage("--format takes csv, noheader and nounits, and not '" + word + "'");
    }
  }
}

// `value` gives the option's own: behind "=", or the next word.
template <class Value>
void readOption(Request& request, const std::string& name, Value value) {
  if (name == "-L" || name == "--list-gpus") {
    request.list = true;
  } else if (name == "-i" || name == "--id") {
    request.ids = split(value());
  } else if (name == "-l" || name == "--loop") {
    request.loop = interval(value(), 1000);
  } else if (name == "-lms" || name == "--loop-ms") {
    request.loop = interval(value(), 1);
  } else if (name == "--format") {
    readFormat(request, value());
  } else if (name == "--query-gpu") {
    request.queryGpus = true;
    request.fields = split(value());
  } else if (name == "--query-compute-apps") {
    request.queryApps = true;
    request.fields = split(value());
  } else if (name == "--help-query-gpu") {
    request.helpFields = true;
  } else {
    usage("there is no option '" + name + "'; `gpupool smi --help` shows those that there are");
  }
}

Request readRequest(const Words& words) {
  Request request;
  for (size_t i = 0; i < words.size(); ++i) {
    const size_t equals = words[i].starts_with("--") ? words[i].find('=') : std::string::npos;
    const std::string name = words[i].substr(0, equals);
    readOption(request, name, [&]() -> std::string {
      if (equals != std::string::npos) return words[i].substr(equals + 1);
      if (i + 1 == words.size()) usage(name + " needs a value");
      return words[++i];
    });
  }
  const bool query = request.queryGpus || request.queryApps;
  if (query && !request.csv) usage("a query needs --format=csv");
  if (!query && request.csv) usage("--format needs --query-gpu or --query-compute-apps");
  return request;
}

NvmlLibrary load() {
  const char* holder = std::getenv("GPUPOOL_HOLDER");
  if (holder == nullptr || *holder == 0)
    throw CommandError(
        kExitNoDriver,
        "smi: no lease here: run it inside `gpupool run`; `gpupool devices -v` shows the pool");
  const std::string library = clientLibraryDirectory() + "/libnvidia-ml.so.1";
  if (::access(library.c_str(), R_OK) != 0)
    throw CommandError(kExitNoDriver, "smi: " + library +
                                          " is missing: this installation has no NVML library. Install it "
                                          "there, or name its folder in GPUPOOL_LIBRARY_DIR");
  return NvmlLibrary(library);
}

SmiGpu gpuAt(const NvmlLibrary& nvml, nvmlDevice_t device) {
  unsigned index = 0;
  nvml.ask("nvmlDeviceGetIndex", device, &index);
  return {nvml, device, index};
}

SmiGpu gpuOf(const NvmlLibrary& nvml, const std::string& id) {
  nvmlDevice_t device = nullptr;
  nvmlReturn_t status = NVML_ERROR_NOT_FOUND;
  if (!id.empty() && id.find_first_not_of("0123456789") == std::string::npos)
    status = nvml.ask("nvmlDeviceGetHandleByIndex_v2",
                      static_cast<unsigned>(std::strtoul(id.c_str(), nullptr, 10)), &device);
  else if (id.find(':') != std::string::npos)
    status = nvml.ask("nvmlDeviceGetHandleByPciBusId_v2", id.c_str(), &device);
  else
    status = nvml.ask("nvmlDeviceGetHandleByUUID", id.c_str(), &device);
  if (status != NVML_SUCCESS) throw CommandError(kExitNotFound, "smi: this lease has no GPU '" + id + "'");
  return gpuAt(nvml, device);
}

std::vector<SmiGpu> gpusOf(const NvmlLibrary& nvml, const Request& request) {
  std::vector<SmiGpu> gpus;
  gpus.reserve(request.ids.size());
  for (const std::string& id : request.ids) gpus.push_back(gpuOf(nvml, id));
  unsigned count = 0;
  if (request.ids.empty()) nvml.ask("nvmlDeviceGetCount_v2", &count);
  for (unsigned i = 0; i < count; ++i) {
    nvmlDevice_t device = nullptr;
    if (nvml.ask("nvmlDeviceGetHandleByIndex_v2", i, &device) == NVML_SUCCESS)
      gpus.push_back(gpuAt(nvml, device));
  }
  return gpus;
}

std::string value(const char* field, const SmiGpu& gpu) { return smiText(*findSmiField(field), gpu, false); }

void printRow(const std::vector<std::string>& cells) {
  for (size_t i = 0; i < cells.size(); ++i) std::cout << (i == 0 ? "" : ", ") << cells[i];
  std::cout << "\n";
}

std::vector<const SmiField*> fieldsOf(const Request& request) {
  std::vector<const SmiField*> fields;
  for (const std::string& name : request.fields) {
    fields.push_back(findSmiField(name));
    if (fields.back() != nullptr) continue;
    std::cout << "Field \"" << name << "\" is not a valid field to query.\n\n";
    throw CommandError(kExitUsage, "smi: `gpupool smi --help-query-gpu` shows the fields");
  }
  return fields;
}

void printQuery(const std::vector<const SmiField*>& fields, const std::vector<SmiGpu>& gpus, bool header,
                bool units) {
  std::vector<std::string> cells;
  cells.reserve(fields.size());
  for (const SmiField* field : fields) cells.push_back(smiHeading(*field));
  if (header) printRow(cells);
  for (const SmiGpu& gpu : gpus) {
    cells.clear();
    for (const SmiField* field : fields) cells.push_back(smiText(*field, gpu, units));
    printRow(cells);
  }
}

std::vector<nvmlProcessInfo_t> processesOf(const SmiGpu& gpu) {
  unsigned count = 256;
  std::vector<nvmlProcessInfo_t> processes(count);
  const bool known = gpu.nvml.ask("nvmlDeviceGetComputeRunningProcesses_v3", gpu.device, &count,
                                  processes.data()) == NVML_SUCCESS;
  processes.resize(known ? count : 0);
  return processes;
}

std::string processName(const SmiGpu& gpu, unsigned pid) {
  char name[256] = {};
  const nvmlReturn_t status =
      gpu.nvml.ask("nvmlSystemGetProcessName", pid, static_cast<char*>(name), unsigned{sizeof name});
  return status == NVML_SUCCESS ? name : "[N/A]";
}

std::string appCell(const std::string& field, const SmiGpu& gpu, const nvmlProcessInfo_t& process,
                    bool units) {
  if (field == "pid") return std::to_string(process.pid);
  if (field == "gpu_uuid" || field == "gpu_name" || field == "gpu_bus_id") return value(field.c_str(), gpu);
  if (field == "process_name" || field == "name") return processName(gpu, process.pid);
  return std::to_string(process.usedGpuMemory >> 20) + (units ? " MiB" : "");
}

void printApps(const Request& request, const std::vector<SmiGpu>& gpus, bool header) {
  static const std::vector<std::pair<std::string, std::string>> kKnown = {
      {"pid", "pid"},
      {"gpu_uuid", "gpu_uuid"},
      {"gpu_name", "gpu_name"},
      {"gpu_bus_id", "gpu_bus_id"},
      {"process_name", "process_name"},
      {"name", "process_name"},
      {"used_memory", "used_gpu_memory [MiB]"},
      {"used_gpu_memory", "used_gpu_memory [MiB]"}};
  std::vector<std::string> heading;
  for (const std::string& field : request.fields) {
    const auto known =
        std::find_if(kKnown.begin(), kKnown.end(), [&](auto& one) { return one.first == field; });
    if (known == kKnown.end()) {
      std::cout << "Field \"" << field << "\" is not a valid field to query.\n\n";
      throw CommandError(kExitUsage,
                         "smi: the fields are gpu_uuid, gpu_name, gpu_bus_id, pid, process_name and "
                         "used_memory");
    }
    heading.push_back(known->second);
  }
  if (header) printRow(heading);
  for (const SmiGpu& gpu : gpus)
    for (const nvmlProcessInfo_t& process : processesOf(gpu)) {
      std::vector<std::string> cells;
      cells.reserve(request.fields.size());
      for (const std::string& field : request.fields)
        cells.push_back(appCell(field, gpu, process, request.units));
      printRow(cells);
    }
}

void printList(const std::vector<SmiGpu>& gpus) {
  for (const SmiGpu& gpu : gpus)
    std::cout << "GPU " << gpu.index << ": " << value("name", gpu) << " (UUID: " << value("uuid", gpu)
              << ")\n";
}

// "[N/A]" in the table is "N/A"; `unit` follows a value.
std::string cell(const char* field, const SmiGpu& gpu, const char* unit = "") {
  const std::string text = value(field, gpu);
  if (text.starts_with("[")) return text == "[N/A]" ? "N/A" : "ERR!";
  return text + unit;
}

// Whole watts.
std::string wattsCell(const char* field, const SmiGpu& gpu) {
  std::string text = cell(field, gpu);
  text.resize(std::min(text.find('.'), text.size()));
  return text == "N/A" || text == "ERR!" ? text : text + "W";
}

const char* const kRule =
    "+-----------------------------------------+------------------------+----------------------+\n";
const char* const kWideRule =
    "+-----------------------------------------------------------------------------------------+\n";

void printGpu(const SmiGpu& gpu) {
  const std::string memory = cell("memory.used", gpu, "MiB") + " / " + cell("memory.total", gpu, "MiB");
  const std::string power = wattsCell("power.draw", gpu) + " / " + wattsCell("enforced.power.limit", gpu);
  const std::string persistence = cell("persistence_mode", gpu);
  const std::string active = cell("display_active", gpu);
  const auto onOff = [](const std::string& text) {
    return text == "Enabled" ? "On" : text == "Disabled" ? "Off" : text.c_str();
  };
  std::printf("| %3u  %-26.26s  %5s  |   %16s %3s | %20s |\n", gpu.index, cell("name", gpu).c_str(),
              onOff(persistence), cell("pci.bus_id", gpu).c_str(), onOff(active),
              cell("ecc.errors.uncorrected.volatile.total", gpu).c_str());
  std::printf("| %3s  %4s  %4s %22s  | %22s | %7s %12.12s |\n", cell("fan.speed", gpu, "%").c_str(),
              cell("temperature.gpu", gpu, "C").c_str(), cell("pstate", gpu).c_str(), power.c_str(),
              memory.c_str(), cell("utilization.gpu", gpu, "%").c_str(), cell("compute_mode", gpu).c_str());
  std::printf("| %39s | %22s | %20s |\n", "", "", cell("mig.mode.current", gpu).c_str());
  std::fputs(kRule, stdout);
}

void printProcesses(const std::vector<SmiGpu>& gpus) {
  std::printf("\n%s| %-87s |\n| %-87s |\n|%s|\n", kWideRule, "Processes:",
              " GPU          PID   Process name                                          GPU Memory",
              std::string(89, '=').c_str());
  bool any = false;
  for (const SmiGpu& gpu : gpus)
    for (const nvmlProcessInfo_t& process : processesOf(gpu)) {
      any = true;
      std::printf("| %4u  %11u   %-49.49s  %10lluMiB    |\n", gpu.index, process.pid,
                  processName(gpu, process.pid).c_str(), process.usedGpuMemory >> 20);
    }
  if (!any) std::printf("| %-87s |\n", " No running processes found");
  std::fputs(kWideRule, stdout);
}

void printTable(const std::vector<SmiGpu>& gpus) {
  const SmiGpu& first = gpus.front();
  int cuda = 0;
  first.nvml.ask("nvmlSystemGetCudaDriverVersion_v2", &cuda);
  char version[24];
  std::snprintf(version, sizeof version, "%d.%d", cuda / 1000, cuda % 1000 / 10);
  std::cout << value("timestamp", first) << "\n" << std::flush;
  std::printf("%s| gpupool smi               Driver Version: %-22.22s CUDA Version: %-8s |\n%s", kWideRule,
              value("driver_version", first).c_str(), version, kRule);
  std::fputs(
      "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |\n"
      "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |\n"
      "|                                         |                        |               MIG M. |\n"
      "|=========================================+========================+======================|\n",
      stdout);
  for (const SmiGpu& gpu : gpus) printGpu(gpu);
  printProcesses(gpus);
}

void show(const Request& request, const std::vector<const SmiField*>& fields, const std::vector<SmiGpu>& gpus,
          bool first) {
  const bool header = request.header && first;
  if (request.queryGpus)
    printQuery(fields, gpus, header, request.units);
  else if (request.queryApps)
    printApps(request, gpus, header);
  else if (request.list)
    printList(gpus);
  else
    printTable(gpus);
  std::cout << std::flush;
  std::fflush(stdout);
}

// For --help alone: nvidia-smi's way to write options is read by readOption.
void printSmiHelp() {
  std::string text;
  bool given = false;
  std::vector<options::Option> all = {
      {"list-gpus", given, "", "Or -L: one line a GPU."},
      {"query-gpu", text, "FIELDS", "These fields of each GPU, as CSV: names with commas between them."},
      {"help-query-gpu", given, "", "Print the names of the fields."},
      {"query-compute-apps", text, "FIELDS",
       "The lease's processes, as CSV: gpu_uuid, gpu_name, gpu_bus_id, pid, process_name, used_memory."},
      {"format", text, "csv", "With a query: csv, or csv,noheader or csv,noheader,nounits."},
      {"id", text, "GPUS", "Or -i: only these GPUs, by index, UUID or PCI address."},
      {"loop", text, "SECONDS", "Or -l: again and again, after so many seconds."},
      {"loop-ms", text, "MS", "Or -lms: after so many milliseconds."}};
  parseCommand({"--help"}, kSmiHelp, nullptr, {}, std::move(all));
}

}  // namespace

int runSmi(const Words& words) {
  if (std::find_if(words.begin(), words.end(),
                   [](const std::string& word) { return word == "--help" || word == "-h"; }) != words.end()) {
    printSmiHelp();
    return 0;
  }
  const Request request = readRequest(words);
  if (request.helpFields) {
    for (const SmiField& field : smiFields()) {
      std::cout << "\"" << field.name << "\"";
      for (const char* other : field.otherNames) std::cout << " or \"" << other << "\"";
      std::cout << "\n";
    }
    return 0;
  }
  const auto fields = request.queryGpus ? fieldsOf(request) : std::vector<const SmiField*>{};
  try {
    const NvmlLibrary nvml = load();
    const auto gpus = gpusOf(nvml, request);
    for (bool first = true;; first = false) {
      show(request, fields, gpus, first);
      if (request.loop.count() == 0) return 0;
      std::this_thread::sleep_for(request.loop);
    }
  } catch (const NvmlError& error) {
    throw CommandError(kExitNoDriver,
                       std::string("smi: the lease's holder does not tell of its GPUs: ") + error.what());
  }
}

}  // namespace gpupool::cli
