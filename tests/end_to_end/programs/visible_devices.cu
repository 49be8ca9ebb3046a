// CUDA_VISIBLE_DEVICES in all its forms: the devices it leaves, in its order, and each of them at work. This
// process never uses CUDA: it runs itself once for each value. With --devices 2 a second device must be
// there.
#include <sys/wait.h>
#include <unistd.h>

#include <cctype>
#include <string>

#include "driver_check.h"

__global__ void fill(int* values, int value) { values[threadIdx.x] = value + threadIdx.x; }

// In the child: cuInit's answer, and the UUID of each device that works.
static int list() {
  CUresult status = cuInit(0);
  std::printf("%d", static_cast<int>(status));
  int devices = 0;
  if (status == CUDA_SUCCESS) CUDA(cudaGetDeviceCount(&devices));
  std::vector<int*> memory(devices);
  for (int i = 0; i < devices; ++i) {
    CUdevice device;
    CUuuid uuid;
    DRIVER(cuDeviceGet(&device, i));
    DRIVER(cuDeviceGetUuid(&uuid, device));
    CUDA(cudaSetDevice(i));
    CUDA(cudaMalloc(&memory[i], 64 * sizeof(int)));
    fill<<<1, 64>>>(memory[i], i * 100);
    CUDA(cudaDeviceSynchronize());
    std::printf(" ");
    for (unsigned char byte : uuid.bytes) std::printf("%02x", byte);
  }
  for (int i = 0; i < devices; ++i) {
    int got[64];
    CUDA(cudaMemcpy(got, memory[i], sizeof got, cudaMemcpyDefault));
    for (int j = 0; j < 64; ++j) REQUIRE(got[j] == i * 100 + j);
    if (i != 0) CUDA(cudaMemcpyPeer(memory[0], 0, memory[i], i, sizeof got));
    void* managed = nullptr;
    CUDA(cudaSetDevice(i));
    CUDA(cudaMallocManaged(&managed, 4096));
    CUDA(cudaMallocAsync(&managed, 4096, nullptr));
    CUDA(cudaDeviceSynchronize());
  }
  std::printf("\n");
  return 0;
}

// What a child says that sees `value`; null: the variable is not set.
static std::string ask(const char* self, const char* value) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  std::fflush(stdout);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    dup2(ends[1], STDOUT_FILENO);
    close(ends[0]);
    value != nullptr ? setenv("CUDA_VISIBLE_DEVICES", value, 1) : unsetenv("CUDA_VISIBLE_DEVICES");
    execl(self, self, "--list", static_cast<char*>(nullptr));
    _exit(127);
  }
  close(ends[1]);
  std::string said;
  char buffer[512];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;) said.append(buffer, n);
  close(ends[0]);
  int status = -1;
  waitpid(child, &status, 0);
  if (status != 0) check::fail("with CUDA_VISIBLE_DEVICES=%s: status %d, %s", value, status, said.c_str());
  return said;
}

static std::string withDashes(const std::string& hex) {
  std::string text = "GPU-";
  for (size_t i = 0; i < hex.size(); ++i) {
    if (i == 8 || i == 12 || i == 16 || i == 20) text += '-';
    text += hex[i];
  }
  return text;
}

int main(int argc, char** argv) {
  if (check::flag(argc, argv, "--list")) return list();
  const char* self = "/proc/self/exe";
  std::vector<std::string> uuids;
  const std::string all = ask(self, nullptr);
  REQUIRE(all.compare(0, 2, "0 ") == 0);
  for (size_t at = 2; at < all.size(); at += 33) uuids.push_back(all.substr(at, 32));
  REQUIRE(static_cast<int>(uuids.size()) >= check::option(argc, argv, "--devices", 1));
  const int count = static_cast<int>(uuids.size()), last = count - 1;

  auto leaves = [&](const std::string& value, const std::vector<int>& devices) {
    std::string expected = devices.empty() ? "100" : "0";
    for (int device : devices) expected += " " + uuids[device];
    const std::string said = ask(self, value.c_str());
    if (said != expected + "\n")
      check::fail("CUDA_VISIBLE_DEVICES=%s gives %s, expected %s", value.c_str(), said.c_str(),
                  expected.c_str());
  };
  const std::string l = std::to_string(last), beyond = std::to_string(count);
  leaves(l, {last});
  leaves(" " + l, {last});
  leaves(l + " ", {last});
  leaves("+0" + l, {last});
  leaves(l + ",-1,0", {last});
  leaves(l + "," + beyond + ",0", {last});
  leaves(l + ",none", {last});
  leaves(l + ",", {last});
  if (count > 1) leaves("1,0", {1, 0});
  if (count > 1) leaves("0,1", {0, 1});
  check::say("numbers");
  for (const char* value : {"", " ", "-1", "-1,0", ",0", "NoDevFiles", "none", "GPU-", "MIG-", "gpu-0"})
    leaves(value, {});
  leaves(beyond + ",0", {});
  REQUIRE(ask(self, (l + "," + l).c_str()) == "101\n");
  check::say("what names no device, or one twice");

  const std::string first = withDashes(uuids[0]), final = withDashes(uuids[last]);
  size_t unique = 5;
  for (const std::string& other : uuids)
    while (other != uuids[last] && withDashes(other).compare(0, unique, final, 0, unique) == 0) ++unique;
  std::string upper = final;
  for (size_t i = 4; i < upper.size(); ++i) upper[i] = static_cast<char>(std::toupper(upper[i]));
  leaves(final, {last});
  leaves(final.substr(0, unique), {last});
  leaves("MIG-" + final.substr(4, unique - 4), {last});
  leaves(upper, {last});
  leaves(final + ",0", {last});
  leaves(final + ",GPU-", {last});
  if (count > 1) leaves(final + "," + first, {last, 0});
  if (count > 1 && unique > 5) leaves(final.substr(0, unique - 1), {});
  check::say("UUIDs");
  return check::pass();
}
