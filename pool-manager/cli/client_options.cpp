#include "pool-manager/cli/client_options.h"

#include <unistd.h>

#include <cstdlib>

#include "base/transport_names.h"
#include "pool-manager/cli/places.h"
#include "pool-manager/model.h"

namespace gpupool::cli {

const char kClientPrefix[] = "GPUPOOL_";
const char kClientIntroduction[] =
    "Configuration of gpupool on a machine that uses the pool. Every option is shown at its default. The "
    "environment variable GPUPOOL_<OPTION> overrides this file, and the command line (--option) overrides "
    "both. The file that is read is the one that $GPUPOOL_CONFIG names, or else the first that exists of "
    "~/.config/gpupool/client.yaml, <prefix>/etc/gpupool/client.yaml and /etc/gpupool/client.yaml. Times are "
    "written as 500ms, 2s, 5m or 1h, sizes as 512MiB or 20GiB.";

void checkTransport(const std::string& name) {
  if (findTransport(name) == nullptr)
    throw options::OptionError("--transport: '" + name + "' is not " + transportChoices(" or "));
}

namespace {

void checkLength(const std::string& option, const std::string& text, size_t most) {
  if (text.size() > most)
    throw options::OptionError(option + ": at most " + std::to_string(most) + " bytes, and these are " +
                               std::to_string(text.size()));
}

}  // namespace

void checkReason(const std::string& text) { checkLength("--reason", text, pool::kMostReason); }

void checkTenant(const std::string& option, const std::string& tenant) {
  checkLength(option, tenant, kMostTenantBytes);
}

CredentialSource credentialsOf(const ClientOptions& client) {
  checkTenant("--tenant", client.tenant);
  return gpupool::credentialsOf(client.tokenFile, client.tenant, client.tlsCa);
}

std::vector<options::Option> ClientOptions::table() {
  options::Option gpuCount{"gpus", gpus, "N",
                           "The number of GPUs to lease, 1 to 8. All of them are on one server."};
  gpuCount.hint = "it says how many; which GPUs says --gpu";
  return {
      {"manager", manager, "ADDRESS",
       "The address of the pool manager: host:port or unix:/path. Several addresses, separated by commas, "
       "are tried in order. Empty: the pool that `gpupool up` started on this machine."},
      gpuCount,
      {"memory", memory, "SIZE",
       "The memory to lease on each GPU, for example 20GiB. Other leases may use the rest of the GPU. 0: "
       "lease whole GPUs."},
      {"gpu", gpu, "WHICH",
       "Which GPUs: a part of their name, whatever its case (h200; of several names, joined by commas, one "
       "has "
       "to fit), or what they have at least: memory>=80GiB, compute>=9.0 (or at most: <=). Several are "
       "joined "
       "by commas: h200,memory>=140GiB. `gpupool devices` lists the names. Empty: any."},
      {"share", share, "PERCENT",
       "Of the GPUs' time, so much at least while other leases want it too: 25% or 25. It counts where a "
       "server leases more memory than its GPUs have, so that leases take turns. Empty: an equal part of "
       "what "
       "the leases that name a share leave."},
      {"priority", priority, "low|normal|high",
       "The class. Of those who wait for GPUs, a higher one is served first. Where leases take turns, one of "
       "a "
       "higher priority goes first, and those of a lower one wait while it has something to do."},
      {"protect", options::SwitchWithTime{&protect, &protectInterval}, "TIME",
       "The program goes on when the process dies on the server that has its GPU memory, or the whole server "
       "does: from its last checkpoint, and the CUDA calls that it has made since are made again. The server "
       "checkpoints it by itself, at moments in which its GPUs are idle. `gpupool leases -v` says whether it "
       "is protected. It goes over ucx, unless --transport says shm, and is not protected then; see "
       "docs/failover.md. A time is that of --protect-interval. Empty: as "
       "the pool's operator has set up the tenant "
       "(`gpupool quota set --protect`), usually not."},
      {"protect-interval", protectInterval, "TIME",
       "With --protect: how often the program is checkpointed, if it has made calls since. At least 1s."},
      {"protect-log", protectLog, "SIZE",
       "With --protect: the memory of this machine, in each process of the program, for its calls since the "
       "last checkpoint. Nearly full, it asks for the next checkpoint early."},
      {"protect-log-data", protectLogData, "SIZE",
       "With --protect: likewise for the data that it has copied to its GPUs since."},
      {"protect-keep", protectKeep, "holder|standby|server",
       "With --protect: who keeps the checkpoints. holder: this machine, so that the program goes on on "
       "another server of the pool when its own dies; what has changed travels here with each checkpoint. "
       "standby: another server of the pool, so that it goes on likewise, and nothing travels here; while "
       "there is none, as holder. "
       "server: the server alone, so that the program survives the death of its worker and no more."},
      {"protect-dir", protectDir, "FOLDER",
       "With --protect-keep holder, or standby while there is none: the folder in which the checkpoints are, "
       "as files without a name: they are gone with the program. Empty: in this machine's memory."},
      {"protect-size", protectSize, "SIZE",
       "Likewise: so much of that folder or memory, for all checkpoints of the program "
       "together. While the next one comes the last one is kept, too. What does not fit is not protected."},
      {"protect-wait", protectWait, "TIME",
       "With --protect-keep holder or standby: how long another server is waited for, with GPUs of the same "
       "model and driver. Then the program's CUDA calls fail, with a line that says what is lost. At most "
       "24h."},
      {"protect-silence", protectSilence, "TIME",
       "With --protect-keep holder or standby: after so long without a sign of life from its server the "
       "program goes on elsewhere. "
       "While it could not (`protected only while idle`, leases that take turns), --stall-time "
       "counts. 0: it always does. At least 1s."},
      {"on-divergence", onDivergence, "stop|continue",
       "With --protect: what happens if calls that are made again give other data than the program has seen "
       "before, because its kernels give other results from run to run. stop: its CUDA calls fail. continue: "
       "it goes on with the new data; a line says how much differed."},
      {"transport", transport, transportChoices("|"),
       "How to reach the server: shm (shared memory, on the same machine) or ucx (any network, over RDMA or "
       "TCP). Empty: shm where that is possible, else ucx; ucx for what is protected (--protect). A program "
       "for which shm is named keeps it: it is not moved to another server."},
      {"network-device", networkDevice, "NAME",
       "The network device that ucx uses, for example eth0 or mlx5_0:1. Empty: the one on the route to the "
       "server."},
      {"server", server, "NAME", "Lease on the server of this name only. Empty: on any server."},
      {"spread", spread, "",
       "Lease where most is free, so that the lease shares its server and its GPUs with few others. Else it "
       "is placed where least is free, so that whole GPUs and servers stay free for those who need them."},
      {"pack", pack, "", "Not --spread, whatever the file or the environment says.", true},
      {"reason", reason, "TEXT",
       "What the lease is for, for people: `gpupool leases -v` and `gpupool audit` show it. At most 200 "
       "bytes."},
      {"time", time, "TIME",
       "The time limit: the lease ends so long after its grant, whatever runs. `gpupool run` prints a line "
       "ahead of that. A request with a limit may be served before others that wait, if it ends before they "
       "could begin. 0: no limit."},
      {"idle-release", idleRelease, "TIME",
       "Give the GPUs back when they have not been used for this long: no call, and nothing runs on them. A "
       "program that has a session goes on with its next call, when there is room again; without a session "
       "the "
       "lease ends. 0: as the manager is set up, usually never."},
      {"claim", claim, "CLAIM",
       "Use the GPUs of this claim (`gpupool claim`), named by its id or its job, instead of leasing. What "
       "the "
       "claim has counts, and not the options that name GPUs. Empty: lease."},
      {"tenant", tenant, "NAME",
       "The tenant (account) that leases. If the manager requires tokens: the tenant whose token in "
       "--token-file is used. Empty: the only one in that file."},
      {"token-file", tokenFile, "FILE",
       "A file with the token, for a manager that requires one: the line 'tenant: token', file mode 0600. "
       "Lines 'certificate sha256:...' name the manager's certificate: then no other is trusted, and TLS is "
       "used. Only the process that holds the lease reads the file; the program never sees it."},
      {"tls-ca", tlsCa, "FILE",
       "The authorities (PEM) that issue the manager's certificate, for its host's name, where a site has "
       "some: TLS is used. Empty: only the certificates that the token file names."},
      {"wait", wait, "TIME", "How long to wait for GPUs to become free. 0: fail at once."},
      {"ttl", ttl, "TIME",
       "The lease's time to live: the lease ends when it has not been renewed for this long. Its holder "
       "process renews it three times in that time."},
      {"stall-time", stallTime, "TIME",
       "Give a worker up that has shown no sign of life for this long, because it was stopped or its "
       "machine is overloaded. CUDA calls then fail, and a line on stderr says why. 0: never, as long as "
       "the worker's machine answers."},
  };
}

std::string clientConfigFile() {
  if (const char* chosen = std::getenv("GPUPOOL_CONFIG"); chosen != nullptr && *chosen != '\0') return chosen;
  std::vector<std::string> candidates;
  const char* config = std::getenv("XDG_CONFIG_HOME");
  const char* home = std::getenv("HOME");
  if (config != nullptr && *config == '/')
    candidates.push_back(std::string(config) + "/gpupool/client.yaml");
  else if (home != nullptr && *home == '/')
    candidates.push_back(std::string(home) + "/.config/gpupool/client.yaml");
  candidates.push_back(executableDirectory() + "/../etc/gpupool/client.yaml");
  candidates.push_back("/etc/gpupool/client.yaml");
  for (const std::string& path : candidates)
    if (::access(path.c_str(), R_OK) == 0) return path;
  return "";
}

}  // namespace gpupool::cli
