#include "server/walls/calls.h"

#include <fcntl.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace gpupool::server::walls {
namespace {

// With any arguments. What names a file is landlock's concern.
constexpr const char* kPermitted[] = {
    // memory
    "brk", "mmap", "mremap", "munmap", "mprotect", "madvise", "mincore", "msync", "mlock", "mlock2",
    "munlock", "mlockall", "munlockall", "memfd_create", "membarrier", "mbind", "get_mempolicy",
    "set_mempolicy",
    // files and descriptors
    "close", "close_range", "read", "write", "pread64", "pwrite64", "readv", "writev", "preadv", "pwritev",
    "preadv2", "pwritev2", "lseek", "sendfile", "copy_file_range", "fstat", "stat", "lstat", "newfstatat",
    "statx", "statfs", "fstatfs", "access", "faccessat", "faccessat2", "readlink", "readlinkat", "getdents",
    "getdents64", "getcwd", "dup", "dup2", "dup3", "ioctl", "flock", "fsync", "fdatasync", "fadvise64",
    "fallocate", "ftruncate", "rename", "renameat", "renameat2", "unlink", "unlinkat", "umask", "pipe",
    "pipe2", "eventfd", "eventfd2", "signalfd", "signalfd4", "timerfd_create", "timerfd_settime",
    "timerfd_gettime", "epoll_create", "epoll_create1", "epoll_ctl", "epoll_wait", "epoll_pwait",
    "epoll_pwait2", "poll", "ppoll", "select", "pselect6",
    // on sockets that it has
    "sendto", "sendmsg", "sendmmsg", "recvfrom", "recvmsg", "recvmmsg", "shutdown", "getsockopt",
    "setsockopt", "getsockname", "getpeername",
    // time
    "clock_gettime", "clock_getres", "clock_nanosleep", "nanosleep", "gettimeofday", "time", "times",
    "getitimer", "setitimer", "alarm", "pause", "timer_create", "timer_settime", "timer_gettime",
    "timer_getoverrun", "timer_delete",
    // threads and signals of its own
    "futex", "futex_waitv", "set_tid_address", "set_robust_list", "get_robust_list", "rseq", "arch_prctl",
    "restart_syscall", "rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "rt_sigpending", "rt_sigtimedwait",
    "rt_sigsuspend", "sigaltstack", "exit", "exit_group", "wait4", "waitid", "sched_yield",
    "sched_getaffinity", "sched_setaffinity", "sched_getscheduler", "sched_getparam",
    "sched_get_priority_max", "sched_get_priority_min", "getpriority",
    // about itself and the machine; pidfd_open: to see that the client is gone
    "getpid", "gettid", "getppid", "getpgrp", "getpgid", "getsid", "getuid", "geteuid", "getgid", "getegid",
    "getresuid", "getresgid", "getgroups", "capget", "uname", "sysinfo", "getrusage", "getrlimit", "getcpu",
    "getrandom", "pidfd_open", "seccomp"};

constexpr const char* kOpens[] = {"open", "openat"};  // landlock judges their paths
constexpr const char* kNetworkCalls[] = {"connect", "accept", "accept4"};

constexpr int kPrctlOptions[] = {PR_SET_NAME,         PR_GET_NAME,     PR_GET_DUMPABLE,
                                 PR_GET_NO_NEW_PRIVS, PR_CAPBSET_READ, PR_GET_TIMERSLACK,
                                 PR_SET_TIMERSLACK,   PR_GET_SECCOMP,  PR_SET_THP_DISABLE,
                                 PR_GET_THP_DISABLE,  0x53564d41 /* PR_SET_VMA */};
constexpr int kFcntlCommands[] = {F_DUPFD,
                                  F_DUPFD_CLOEXEC,
                                  F_GETFD,
                                  F_SETFD,
                                  F_GETFL,
                                  F_SETFL,
                                  F_GETLK,
                                  F_SETLK,
                                  F_SETLKW,
                                  F_GETOWN,
                                  F_ADD_SEALS,
                                  F_GET_SEALS,
                                  F_GETPIPE_SZ,
                                  F_SETPIPE_SZ,
                                  36 /* F_OFD_GETLK */,
                                  37,
                                  38};
// ioctl(2) of any descriptor: who gets its signals, and input of a terminal that others read.
constexpr unsigned kRefusedIoctls[] = {0x8901 /* FIOSETOWN */, 0x8902 /* SIOCSPGRP */, 0x5412 /* TIOCSTI */,
                                       0x541c /* TIOCLINUX */};

class Filter {
 public:
  explicit Filter(uint32_t otherwise) : context_(seccomp_init(otherwise)) {
    if (context_ == nullptr) throw std::runtime_error("seccomp: no memory for a filter");
    set(SCMP_FLTATR_ACT_BADARCH, SCMP_ACT_KILL_PROCESS);  // calls of 32-bit programs
    set(SCMP_FLTATR_CTL_OPTIMIZE, 2);                     // a tree: the list is long
    set(SCMP_FLTATR_CTL_NNP, 0);                          // it is set, and the list permits no other setting
    set(SCMP_FLTATR_API_SYSRAWRC, 1);                     // the kernel's own errors
  }
  ~Filter() { seccomp_release(context_); }
  Filter(const Filter&) = delete;
  Filter& operator=(const Filter&) = delete;

  // A call that the library or this machine's processors do not know is none that anybody makes.
  void add(uint32_t action, const char* call, std::initializer_list<scmp_arg_cmp> arguments = {}) {
    const int number = seccomp_syscall_resolve_name(call);
    if (number < 0) return;
    const int error = seccomp_rule_add_array(context_, action, number,
                                             static_cast<unsigned>(arguments.size()), arguments.begin());
    if (error != 0) throw std::runtime_error(std::string("seccomp: ") + call + ": " + std::strerror(-error));
  }
  void set(scmp_filter_attr attribute, uint32_t value) {
    const int error = seccomp_attr_set(context_, attribute, value);
    if (error != 0) throw std::runtime_error(std::string("seccomp: an attribute: ") + std::strerror(-error));
  }
  void load() {
    const int error = seccomp_load(context_);
    if (error != 0) throw std::runtime_error(std::string("seccomp: ") + std::strerror(-error));
  }
  int notifications() const { return seccomp_notify_fd(context_); }

 private:
  scmp_filter_ctx context_;
};

scmp_arg_cmp is(unsigned argument, uint64_t value) { return {argument, SCMP_CMP_EQ, value, 0}; }
scmp_arg_cmp isMasked(unsigned argument, uint64_t mask, uint64_t value) {
  return {argument, SCMP_CMP_MASKED_EQ, mask, value};
}

// What is not on the list gets the filter's own answer.
void addList(Filter& filter, bool network) {
  const auto self = static_cast<uint64_t>(getpid());
  for (const char* call : kPermitted) filter.add(SCMP_ACT_ALLOW, call);
  for (int option : kPrctlOptions)
    filter.add(SCMP_ACT_ALLOW, "prctl", {is(0, static_cast<uint64_t>(option))});
  for (int command : kFcntlCommands)
    filter.add(SCMP_ACT_ALLOW, "fcntl", {is(1, static_cast<uint64_t>(command))});
  filter.add(SCMP_ACT_ALLOW, "fcntl", {is(1, F_SETOWN), is(2, self)});
  for (const char* call : {"kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"})
    filter.add(SCMP_ACT_ALLOW, call, {is(0, self)});
  for (uint64_t process : {uint64_t{0}, self}) {
    filter.add(SCMP_ACT_ALLOW, "prlimit64", {is(0, process)});
    filter.add(SCMP_ACT_ALLOW, "move_pages", {is(0, process)});
  }
  filter.add(SCMP_ACT_ALLOW, "setpriority", {is(0, PRIO_PROCESS), is(1, 0)});
  filter.add(SCMP_ACT_ALLOW, "utimensat", {is(1, 0)});  // futimens: without a path
  // Threads, no processes. clone3 is not there: its flags cannot be seen, and without it glibc calls clone.
  filter.add(SCMP_ACT_ALLOW, "clone", {isMasked(0, CLONE_THREAD, CLONE_THREAD)});
  // A datagram socket of a pair could be connected to a name.
  for (uint64_t type : {SOCK_STREAM, SOCK_SEQPACKET})
    filter.add(SCMP_ACT_ALLOW, "socketpair", {is(0, AF_UNIX), isMasked(1, 0xf, type)});
  // NVIDIA's driver makes one in cuInit, binds it to an abstract name and listens, or does not start.
  filter.add(SCMP_ACT_ALLOW, "socket", {is(0, AF_UNIX), isMasked(1, 0xf, SOCK_SEQPACKET)});
  for (const char* call : {"bind", "listen"}) filter.add(SCMP_ACT_ALLOW, call);
  if (!network) return;
  for (uint64_t family : {AF_INET, AF_INET6, AF_NETLINK})
    filter.add(SCMP_ACT_ALLOW, "socket", {is(0, family)});
  for (const char* call : kNetworkCalls) filter.add(SCMP_ACT_ALLOW, call);
}

std::string describe(const seccomp_data& data) {
  const std::unique_ptr<char, decltype(&std::free)> name(
      seccomp_syscall_resolve_num_arch(SCMP_ARCH_NATIVE, data.nr), &std::free);
  const std::string call = name ? name.get() : "call " + std::to_string(data.nr);
  const bool open = call == "open", openat = call == "openat";
  if (open || openat) {
    const auto* path = reinterpret_cast<const char*>(data.args[open ? 0 : 1]);
    return path != nullptr && path[0] == '/' ? std::string("open ") + path : std::string();
  }
  char arguments[80];
  std::snprintf(arguments, sizeof arguments, "(0x%" PRIx64 ", 0x%" PRIx64 ", 0x%" PRIx64 ")",
                static_cast<uint64_t>(data.args[0]), static_cast<uint64_t>(data.args[1]),
                static_cast<uint64_t>(data.args[2]));
  return call + arguments;
}

// Runs for as long as the process does.
void letPass(int notifications, const std::function<void(const std::string&)>& seen) {
  seccomp_notif* request = nullptr;
  seccomp_notif_resp* answer = nullptr;
  // Where nobody listens any more the kernel refuses what it would have let pass (ENOSYS).
  const auto ends = [&](const char* what) {
    seen(std::string("watching has ended: ") + what + ": " + std::strerror(errno));
    close(notifications);
  };
  if (seccomp_notify_alloc(&request, &answer) != 0) return ends("seccomp_notify_alloc");
  for (;;) {
    std::memset(request, 0, sizeof *request);
    if (seccomp_notify_receive(notifications, request) != 0) {
      if (errno == EINTR || errno == ENOENT || errno == ECANCELED) continue;
      return ends("seccomp_notify_receive");
    }
    const std::string call = describe(request->data);
    if (!call.empty()) seen(call);
    *answer = {};
    answer->id = request->id;
    answer->flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
    seccomp_notify_respond(notifications, answer);
  }
}

}  // namespace

bool hasSeccomp() {
  const uint32_t action = SECCOMP_RET_ERRNO;
  return syscall(SYS_seccomp, SECCOMP_GET_ACTION_AVAIL, 0, &action) == 0;
}

void permitCalls(bool network) {
  Filter list(SCMP_ACT_ERRNO(ENOSYS));
  addList(list, network);
  for (const char* call : kOpens) list.add(SCMP_ACT_ALLOW, call);
  // What the list permits with any arguments, a second filter refuses with some.
  Filter refusals(SCMP_ACT_ALLOW);
  for (unsigned request : kRefusedIoctls)
    refusals.add(SCMP_ACT_ERRNO(EPERM), "ioctl", {isMasked(1, 0xffffffff, request)});
  refusals.load();
  list.load();
}

void watchCalls(bool network, std::function<void(const std::string& call)> seen) {
  auto list = std::make_unique<Filter>(SCMP_ACT_NOTIFY);
  addList(*list, network);
  list->add(SCMP_ACT_ERRNO(ENOSYS), "clone3");
  // Started first: it is not under the filter.
  std::promise<int> loaded;
  std::thread([descriptor = loaded.get_future(), seen = std::move(seen)]() mutable {
    if (const int notifications = descriptor.get(); notifications >= 0) letPass(notifications, seen);
  }).detach();
  try {
    list->load();
  } catch (...) {
    loaded.set_value(-1);
    throw;
  }
  loaded.set_value(list->notifications());
  [[maybe_unused]] Filter* kept = list.release();  // its descriptor is the watcher's
}

void refuseNetwork() {
  Filter refusals(SCMP_ACT_ALLOW);
  refusals.set(SCMP_FLTATR_CTL_TSYNC, 1);
  refusals.add(SCMP_ACT_ERRNO(EPERM), "socket");
  for (const char* call : {"bind", "listen"}) refusals.add(SCMP_ACT_ERRNO(EPERM), call);
  for (const char* call : kNetworkCalls) refusals.add(SCMP_ACT_ERRNO(EPERM), call);
  refusals.load();
}

void refuseLocalSockets() {
  Filter refusals(SCMP_ACT_ALLOW);
  refusals.set(SCMP_FLTATR_CTL_TSYNC, 1);
  refusals.add(SCMP_ACT_ERRNO(EPERM), "socket", {is(0, AF_UNIX)});
  refusals.load();
}

}  // namespace gpupool::server::walls
