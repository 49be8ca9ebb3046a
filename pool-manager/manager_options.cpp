#include "pool-manager/manager_options.h"

#include <filesystem>
#include <tuple>

namespace gpupool::pool {

const char kManagerPrefix[] = "GPUPOOL_MANAGER_";
const char kManagerIntroduction[] =
    "Configuration of gpupool-manager. Every option is shown at its default. The environment variable "
    "GPUPOOL_MANAGER_<OPTION> overrides this file, and the command line (--option) overrides both. The file "
    "that is read is the one that --config names, or else /etc/gpupool/manager.yaml. Times are written as "
    "500ms, 2s, 5m or 1h, sizes as 512MiB or 20GiB.";

std::vector<options::Option> ManagerOptions::table() {
  return {
      {"listen", listen, "HOST:PORT",
       "The TCP address for servers and clients; '*' means every interface. Empty: no TCP. Without "
       "tokens (docs/tenants.md) whoever reaches this address can lease."},
      {"tokens", tokens, "FILE",
       "A file of tokens: lines 'tenant: token', file mode 0600, besides those that `gpupool tokens create` "
       "makes. Where there are any, whoever connects from the network must prove that it knows one of them. "
       "A "
       "lease belongs to the tenant that made it. Servers prove the token of the tenant 'servers'. The file "
       "is "
       "read again when it changes. On the Unix socket, this manager's own user needs no token. Empty: no "
       "file."},
      {"socket", socket, "PATH",
       "The Unix socket for clients and servers on this host. This manager's user and root may connect. "
       "Empty: none. --listen or --socket is required."},
      {"http-listen", httpListen, "HOST:PORT",
       "The address for REST and /metrics (docs/rest.md), for example 127.0.0.1:4781, or unix:PATH. Requests "
       "show a token as 'Authorization: Bearer TOKEN'; where the manager has no tokens, whoever reaches this "
       "address may do everything. Empty: no REST."},
      {"tls", tls, "auto|off",
       "auto: what connects by TCP speaks TLS, if there is a certificate; connections from this machine may "
       "go without. Where there are tokens, and an address that is not this machine's alone, there has to be "
       "one. off: no TLS: who can read the network reads tokens (REST) and session keys."},
      {"tls-certificate", tlsCertificate, "FILE",
       "The certificate (PEM), followed by those that lead to its authority, if it has one. `gpupool-manager "
       "init` makes one, `gpupool-manager certificate` does so later, and prints the line of it for token "
       "files. Read again at SIGHUP. Empty: the store's name with .crt."},
      {"tls-key", tlsKey, "FILE",
       "The certificate's key (PEM), without a passphrase, which not everybody may read. Empty: the store's "
       "name with .key."},
      {"store", store, "PATH",
       "The SQLite file that keeps leases across restarts. It is created with mode 0600; its folder must "
       "exist. 'memory': keep nothing."},
      {"any-user", anyUser, "", "Let every user of this host connect to the Unix socket."},
      {"beat", beat, "TIME", "How often each server reports to the manager."},
      {"silent", silent, "TIME", "A server that has not reported for this long gets no new leases."},
      {"min-ttl", minTtl, "TIME", "The shortest time to live of a lease. Shorter requests get this."},
      {"max-ttl", maxTtl, "TIME", "The longest time to live of a lease. Longer requests get this."},
      {"drift", drift, "TIME",
       "A margin added to every deadline, for clocks that differ and messages that are late."},
      {"kill", kill, "TIME",
       "The longest time that a server needs to end the sessions of a lease. If the server does not confirm "
       "the end, the devices count as free again this long after the lease's deadline."},
      {"take-over", takeOver, "TIME",
       "A lease whose holder was killed, on this host, ends so much later, unless another holder takes it "
       "over."},
      {"call", call, "TIME", "How long the manager waits for a server's answer."},
      {"idle-release", idleRelease, "TIME",
       "Leases that name no --idle-release have this one: when a lease has not been used for so long, its "
       "GPUs "
       "are taken back (docs/leases.md). 0: none."},
      {"most-idle", mostIdle, "TIME", "The longest --idle-release, and for those without any. 0: no limit."},
      {"preempt", preempt, "off|suspend|revoke",
       "What a request of a higher class (--priority) that finds no GPUs does to leases of lower classes. "
       "off: nothing; it waits. suspend: it has them suspended, and they come back by themselves; those that "
       "cannot be suspended go on. revoke: and those that cannot be suspended end, after a notice. Whoever "
       "may lease may name any class (docs/leases.md)."},
      {"preempt-grace", preemptGrace, "TIME",
       "What runs on the GPUs of a lease that is preempted has so long to finish. At most 1h."},
      {"preempt-notice", preemptNotice, "TIME",
       "A preempted lease that cannot be suspended ends so long after the notice. At most 24h."},
      {"preempt-min-run", preemptMinRun, "TIME",
       "A lease has its GPUs for so long, each time that it gets them, before it can be preempted."},
      {"half-life", halfLife, "TIME",
       "Of those who wait for GPUs in one class, the tenant that has used least, for its weight, is served "
       "first. Half of what it has used is forgotten after this time. 0: nothing is."},
      {"weights", weights, "TENANT=NUMBER,...",
       "The tenants' weights: one of weight 2 may use twice as much as one of weight 1 before it is served "
       "behind it. Tenants that are not named have 1."},
      {"audit-entries", auditEntries, "N",
       "So many of the latest entries of the audit log are kept, about half a kilobyte each. 0: none."},
  };
}

namespace {

constexpr std::chrono::hours kLongestIdle{720};

}  // namespace

std::string ManagerOptions::certificateFile() const {
  return tlsCertificate.empty() ? std::filesystem::path(store).replace_extension(".crt").string()
                                : tlsCertificate;
}

std::string ManagerOptions::keyFile() const {
  return tlsKey.empty() ? std::filesystem::path(store).replace_extension(".key").string() : tlsKey;
}

void check(const ManagerOptions& options) {
  if (options.preempt != "off" && options.preempt != "suspend" && options.preempt != "revoke")
    throw options::OptionError("--preempt: '" + options.preempt + "' is not off, suspend or revoke");
  for (const auto& [name, time, most] : {std::tuple{"--preempt-grace", options.preemptGrace, 1},
                                         {"--preempt-notice", options.preemptNotice, 24},
                                         {"--preempt-min-run", options.preemptMinRun, 720}})
    if (time > std::chrono::hours(most))
      throw options::OptionError(std::string(name) + ": at most " + std::to_string(most) + "h");
  if (options.tls != "auto" && options.tls != "off")
    throw options::OptionError("--tls: '" + options.tls + "' is not auto or off");
  if (options.tlsCertificate.empty() != options.tlsKey.empty())
    throw options::OptionError("--tls-certificate and --tls-key: give both or neither");
  for (const auto& [name, time] :
       {std::pair{"--idle-release", options.idleRelease}, {"--most-idle", options.mostIdle}})
    if (time.count() != 0 && (time < std::chrono::seconds(1) || time > kLongestIdle))
      throw options::OptionError(std::string(name) + ": 1s to 720h, or 0");
}

}  // namespace gpupool::pool
