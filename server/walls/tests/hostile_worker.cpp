// A worker that has been taken over: started as workers are, behind the same walls, it tries what its own
// process must not reach, and reports for each attempt whether it came through. walls_test.cpp has set up
// what there is to reach.
//   hostile_worker MODE FOLDER SERVER NEIGHBOUR SECRET PORT USER
// FOLDER: token, server.sock, cache/own/image, cache/other/image. SERVER, NEIGHBOUR: processes, both with
// SECRET, the address of 16 bytes. PORT: of 127.0.0.1, and the number in the name of an abstract socket, and
// of a neighbour's file in /dev/shm. USER: to become that one first; 0: to stay.
#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <linux/keyctl.h>
#include <linux/sockios.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <thread>

#include "server/walls/walls.h"
#include "server/worker_process.h"

namespace walls = gpupool::server::walls;

namespace {

struct Targets {
  std::string folder;
  pid_t server, neighbour;
  uintptr_t secret;
  int port;
  int ownCache;  // the tenant's folder, as a session gets it
};

std::string report;

// One line: what was tried, the wall that is to hold, "through" or "refused".
void attempt(const char* wall, const std::string& what, const std::function<bool()>& comesThrough) {
  report += std::string(wall) + "|" + what + "|" + (comesThrough() ? "through" : "refused") + "\n";
}

bool opens(const std::string& path, int flags = O_RDONLY, mode_t mode = 0600) {
  const int file = open(path.c_str(), flags | O_CLOEXEC, mode);
  if (file >= 0) close(file);
  return file >= 0;
}

std::string of(pid_t process, const char* what) { return "/proc/" + std::to_string(process) + "/" + what; }

void tryFiles(const Targets& at) {
  const std::string cache = at.folder + "/cache";
  attempt("", "reads an image of its own tenant", [&] {
    const int file = openat(at.ownCache, "image", O_RDONLY | O_CLOEXEC);
    char byte;
    return file >= 0 && read(file, &byte, 1) == 1;
  });
  attempt("", "writes an image for its own tenant", [&] {
    const int file = openat(at.ownCache, "new.part", O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    return file >= 0 && write(file, "x", 1) == 1 &&
           renameat(at.ownCache, "new.part", at.ownCache, "new") == 0 && unlinkat(at.ownCache, "new", 0) == 0;
  });
  attempt("", "starts a thread", [] {
    bool ran = false;
    std::thread([&] { ran = true; }).join();
    return ran;
  });
  attempt("", "makes memory to share", [] { return memfd_create("shared", MFD_CLOEXEC) >= 0; });
  attempt("landlock", "reads the server's token", [&] { return opens(at.folder + "/token"); });
  attempt("landlock", "lists the server's folder", [&] { return opens(at.folder, O_DIRECTORY); });
  attempt("landlock", "lists the caches of all tenants", [&] { return opens(cache, O_DIRECTORY); });
  attempt("landlock", "leaves its own cache upwards",
          [&] { return openat(at.ownCache, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC) >= 0; });
  attempt("landlock", "writes into the server's folder",
          [&] { return opens(at.folder + "/x", O_WRONLY | O_CREAT); });
  attempt("landlock", "writes into /tmp", [&] { return opens("/tmp", O_WRONLY | O_TMPFILE); });
  attempt("landlock", "reads /etc/passwd", [&] { return opens("/etc/passwd"); });
  attempt("landlock", "makes a folder", [&] { return mkdir((at.folder + "/y").c_str(), 0700) == 0; });
  attempt("landlock", "removes the token", [&] {
    return linkat(AT_FDCWD, (at.folder + "/token").c_str(), AT_FDCWD, (at.folder + "/z").c_str(), 0) == 0 &&
           unlink((at.folder + "/z").c_str()) == 0;
  });
  attempt("seccomp", "empties a file by its path",
          [&] { return truncate((at.folder + "/blank").c_str(), 0) == 0; });
  attempt("seccomp", "changes a file's mode",
          [&] { return chmod((at.folder + "/blank").c_str(), 0666) == 0; });
  attempt("seccomp", "watches a folder", [&] {
    return syscall(SYS_inotify_add_watch, syscall(SYS_inotify_init1, 0), cache.c_str(), 0x100) >= 0;
  });
}

void tryMemoryOf(pid_t process, const std::string& whose, uintptr_t secret) {
  char bytes[16] = "";
  const iovec here{bytes, sizeof bytes}, there{reinterpret_cast<void*>(secret), sizeof bytes};
  attempt("landlock", "reads /proc/PID/mem" + whose, [&] {
    const int file = open(of(process, "mem").c_str(), O_RDONLY | O_CLOEXEC);
    return file >= 0 && pread(file, bytes, sizeof bytes, static_cast<off_t>(secret)) == sizeof bytes;
  });
  attempt("landlock", "reads /proc/PID/environ" + whose, [&] { return opens(of(process, "environ")); });
  attempt("landlock", "lists /proc/PID/fd" + whose, [&] { return opens(of(process, "fd"), O_DIRECTORY); });
  attempt("landlock", "opens a descriptor" + whose, [&] { return opens(of(process, "fd/0")); });
  attempt("landlock", "sees where a descriptor leads" + whose,
          [&] { return readlink(of(process, "fd/0").c_str(), bytes, sizeof bytes) > 0; });
  attempt("seccomp", "reads memory" + whose,
          [&] { return process_vm_readv(process, &here, 1, &there, 1, 0) == sizeof bytes; });
  attempt("seccomp", "writes memory" + whose,
          [&] { return process_vm_writev(process, &here, 1, &there, 1, 0) == sizeof bytes; });
  attempt("seccomp", "traces (ptrace)" + whose, [&] {
    const bool seized = ptrace(PTRACE_SEIZE, process, nullptr, nullptr) == 0;
    if (seized) {
      ptrace(PTRACE_INTERRUPT, process, nullptr, nullptr);
      waitpid(process, nullptr, __WALL);
      ptrace(PTRACE_DETACH, process, nullptr, nullptr);
    }
    return seized;
  });
  attempt("seccomp", "takes a descriptor" + whose, [&] {
    const long pidfd = syscall(SYS_pidfd_open, process, 0);
    return pidfd >= 0 && syscall(SYS_pidfd_getfd, pidfd, 0, 0) >= 0;
  });
}

void tryMemory(const Targets& at) {
  tryMemoryOf(at.server, " of the server", at.secret);
  tryMemoryOf(at.neighbour, " of a neighbour", at.secret);
}

// SIGURG: nobody minds it.
void trySignalsTo(pid_t process, const std::string& whom) {
  attempt("seccomp", "sends a signal" + whom, [&] { return kill(process, SIGURG) == 0; });
  attempt("seccomp", "sends one by tgkill" + whom,
          [&] { return syscall(SYS_tgkill, process, process, SIGURG) == 0; });
  attempt("seccomp", "sends one by tkill" + whom, [&] { return syscall(SYS_tkill, process, SIGURG) == 0; });
  attempt("seccomp", "sends one with data" + whom, [&] {
    siginfo_t info{};
    info.si_code = SI_QUEUE;
    return syscall(SYS_rt_sigqueueinfo, process, SIGURG, &info) == 0;
  });
  attempt("seccomp", "sends one by a pidfd" + whom, [&] {
    const long pidfd = syscall(SYS_pidfd_open, process, 0);
    return pidfd >= 0 && syscall(SYS_pidfd_send_signal, pidfd, SIGURG, nullptr, 0) == 0;
  });
  attempt("seccomp", "has a socket signal" + whom, [&] {
    int ends[2];
    return socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0 && fcntl(ends[0], F_SETOWN, process) == 0;
  });
  attempt("seccomp", "has ioctl signal" + whom, [&] {
    int ends[2], pid = process;
    return socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0 && ioctl(ends[0], FIOSETOWN, &pid) == 0;
  });
  attempt("seccomp", "takes the limits" + whom,
          [&] { return syscall(SYS_prlimit64, process, RLIMIT_CORE, nullptr, nullptr) == 0; });
}

void trySignals(const Targets& at) {
  trySignalsTo(at.server, " to the server");
  trySignalsTo(at.neighbour, " to a neighbour");
  attempt("user", "takes the processors of a neighbour", [&] {
    cpu_set_t processors;
    return sched_getaffinity(at.neighbour, sizeof processors, &processors) == 0 &&
           sched_setaffinity(at.neighbour, sizeof processors, &processors) == 0;
  });
  attempt("seccomp", "signals everybody", [] { return kill(-1, 0) == 0; });
}

bool connects(int family, int type, const sockaddr* address, socklen_t bytes) {
  const int made = socket(family, type | SOCK_CLOEXEC, 0);
  return made >= 0 && connect(made, address, bytes) == 0;
}

void tryNetwork(const Targets& at) {
  sockaddr_in inet{};
  inet.sin_family = AF_INET;
  inet.sin_port = htons(static_cast<uint16_t>(at.port));
  inet.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const auto* to = reinterpret_cast<const sockaddr*>(&inet);
  attempt("seccomp", "connects by TCP", [&] { return connects(AF_INET, SOCK_STREAM, to, sizeof inet); });
  attempt("seccomp", "connects by UDP", [&] { return connects(AF_INET, SOCK_DGRAM, to, sizeof inet); });
  attempt("seccomp", "listens by TCP", [&] {
    const int made = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    return made >= 0 && listen(made, 1) == 0;
  });
  attempt("seccomp", "asks the kernel by netlink", [&] { return socket(AF_NETLINK, SOCK_RAW, 0) >= 0; });
  sockaddr_un path{};
  path.sun_family = AF_UNIX;
  std::snprintf(path.sun_path, sizeof path.sun_path, "%s/server.sock", at.folder.c_str());
  const auto* named = reinterpret_cast<const sockaddr*>(&path);
  attempt("seccomp", "connects to the server's socket",
          [&] { return connects(AF_UNIX, SOCK_STREAM, named, sizeof path); });
  sockaddr_un abstract{};
  abstract.sun_family = AF_UNIX;
  const int length =
      std::snprintf(abstract.sun_path + 1, sizeof abstract.sun_path - 1, "gpupool-%d", at.port);
  const auto bytes =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(length));
  const auto* nameless = reinterpret_cast<const sockaddr*>(&abstract);
  attempt("seccomp", "connects to an abstract socket",
          [&] { return connects(AF_UNIX, SOCK_STREAM, nameless, bytes); });
  attempt("seccomp", "makes a local socket as the driver's",
          [&] { return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0) >= 0; });
  attempt("seccomp", "makes a pair of sockets that can be connected anew", [&] {
    int ends[2];
    return socketpair(AF_UNIX, SOCK_DGRAM, 0, ends) == 0;
  });
}

// Any node of a GPU: this worker has none.
bool opensGpu() {
  for (int minor = 0; minor < 64; ++minor)
    if (opens("/dev/nvidia" + std::to_string(minor), O_RDWR)) return true;
  return false;
}

void tryDevices(const Targets& at) {
  const std::string memory = "/dev/shm/gpupool-walls-" + std::to_string(at.port);
  const auto sees = [](const char* path) { return access(path, F_OK) == 0; };
  attempt("", "reads /dev/urandom", [] { return opens("/dev/urandom"); });
  attempt("", "writes to /dev/null", [] { return opens("/dev/null", O_WRONLY); });
  attempt("devices", "opens another's GPU", opensGpu);
  attempt("devices", "sees the driver of GPUs", [&] { return sees("/dev/nvidiactl"); });
  attempt("devices", "reads the machine's memory", [] { return opens("/dev/mem"); });
  attempt("devices", "reads the kernel's log", [] { return opens("/dev/kmsg"); });
  attempt("devices", "sees the kernel's log", [&] { return sees("/dev/kmsg"); });
  attempt("devices", "opens /dev/fuse", [] { return opens("/dev/fuse", O_RDWR); });
  attempt("devices", "sees terminals", [&] { return sees("/dev/ptmx"); });
  attempt("devices", "opens memory of a neighbour in /dev/shm", [&] { return opens(memory, O_RDWR); });
  attempt("devices", "sees memory in /dev/shm", [&] { return sees(memory.c_str()); });
  attempt("devices", "makes memory in /dev/shm", [&] {
    const std::string made = memory + "-made";
    return opens(made, O_RDWR | O_CREAT | O_EXCL) && unlink(made.c_str()) == 0;
  });
}

void tryKernel(const Targets&) {
  attempt("seccomp", "makes a process", [] {
    const pid_t child = fork();
    if (child == 0) _exit(0);
    if (child > 0) waitpid(child, nullptr, 0);
    return child > 0;
  });
  attempt("seccomp", "runs /bin/sh", [] {
    char shell[] = "/bin/sh", option[] = "-c", command[] = ":";
    char* words[] = {shell, option, command, nullptr};
    pid_t child = 0;
    if (posix_spawn(&child, shell, nullptr, nullptr, words, nullptr) != 0) return false;
    waitpid(child, nullptr, 0);
    return true;
  });
  attempt("seccomp", "makes namespaces", [] { return syscall(SYS_unshare, CLONE_FS) == 0; });
  attempt("seccomp", "makes an io_uring", [] {
    char parameters[120] = "";
    return syscall(SYS_io_uring_setup, 1, parameters) >= 0;
  });
  attempt("seccomp", "makes SysV memory", [] {
    const int made = shmget(IPC_PRIVATE, 4096, 0600);
    if (made >= 0) shmctl(made, IPC_RMID, nullptr);
    return made >= 0;
  });
  attempt("seccomp", "asks for keys",
          [] { return syscall(SYS_keyctl, KEYCTL_GET_KEYRING_ID, KEY_SPEC_PROCESS_KEYRING, 1) >= 0; });
  attempt("seccomp", "can be looked into again", [] { return prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0; });
  attempt("undumpable", "can be looked into", [] { return prctl(PR_GET_DUMPABLE, 0, 0, 0, 0) != 0; });
  attempt("no_new_privs", "could run setuid programs",
          [] { return prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 0; });
  attempt("limits", "leaves a core", [] {
    rlimit limit{};
    return getrlimit(RLIMIT_CORE, &limit) == 0 && limit.rlim_max != 0;
  });
}

// Those that it has by its start: its standard ones, the server's socket, and what this program has opened.
void countDescriptors(int most) {
  attempt("start", "has a descriptor that it should not have", [&] {
    DIR* folder = opendir("/proc/self/fd");
    if (folder == nullptr) return true;
    bool found = false;
    while (const dirent* entry = readdir(folder)) {
      const int descriptor = std::atoi(entry->d_name);
      found = found || (entry->d_name[0] != '.' && descriptor > most && descriptor != dirfd(folder));
    }
    closedir(folder);
    return found;
  });
}

}  // namespace

int main(int count, char** words) {
  if (count != 8) return 2;
  Targets at{words[2],
             static_cast<pid_t>(std::atol(words[3])),
             static_cast<pid_t>(std::atol(words[4])),
             std::strtoull(words[5], nullptr, 10),
             std::atoi(words[6]),
             -1};
  const auto user = static_cast<uid_t>(std::atol(words[7]));
  if (user != 0 && (setgid(user) != 0 || setuid(user) != 0)) return 3;
  if (user != 0) prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);  // it was not changed by an exec
  gpupool::server::WorkerProcess process;
  try {
    countDescriptors(gpupool::server::kControlDescriptor);
    at.ownCache = open((at.folder + "/cache/own").c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    walls::Plan plan{*walls::modeNamed(words[1]), true, "", at.folder + "/cache", {}};
    if (walls::whyNoOwnDevices().empty()) plan.devices.emplace();
    const auto state = walls::raise(plan);
    walls::closeLocal();
    walls::closeNetwork();
    process.reportReady("", state.standing);
    tryFiles(at);
    tryMemory(at);
    trySignals(at);
    tryNetwork(at);
    tryDevices(at);
    tryKernel(at);
    process.reportEnded(report);
    return 0;
  } catch (const std::exception& error) {
    process.reportFailed(error.what());
    return 1;
  }
}
