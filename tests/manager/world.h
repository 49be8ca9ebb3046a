#pragma once
// A pool without machines: the manager's real Pool, AwakeClock and Store around simulated servers, GPUs,
// holders, disks and wires, all from one seed. Everything goes wrong that can: stalls, kills, restarts,
// partitions, two servers with one GPU, full disks, lost stores. All the while leases are suspended and
// resumed, their sessions are moved, to other GPUs and servers, too, and servers are cordoned and uncordoned.
// Some servers overcommit. In some pools GPUs are of two models, and requests name models, classes, tenants
// and time limits; and in some of all, requests of a higher class preempt leases of lower ones.
//
// The checker knows nothing of the pool's bookkeeping. It looks at what runs on each GPU and at what holders
// hold: of no GPU more is leased than fits on it, or than its server overcommits, and then every lease fits
// beside what all others need while it is not their turn; no request is granted twice, no session is ended
// while its lease goes on, no holder that renews loses its lease because the manager was stopped, no lease
// comes to be on a cordoned server, and when all faults are over every lease ends and every GPU can be leased
// again. A lease has the model that it named, ends when its time limit is over and not before, and has
// nothing for which somebody waits who precedes it. In some pools leases are claims of jobs, which programs
// adopt: to claim for a job again gives no second lease, and one that a program uses does not end. A lease
// that is held in files is not lost with its server, nor with the manager; its sessions are in one place at
// most, and come back from those files.
//
// The simulated servers do not check memory, as real ones do: the manager alone has to be right.

#include <cstdint>
#include <random>
#include <string>

namespace gpupool::history {

// What the checker is to find: tests plant one to see that it does.
enum class Bug {
  none,
  countsGaps,      // the manager's clock runs on while the manager is stopped
  believesRevoke,  // a server says that a lease has ended before its workers have
  hidesWorkers,    // a restarted server does not say which workers of its earlier life still run
  forgetsStore,    // the disk loses what it has accepted
  earlySuspends,   // a server says that a lease is suspended before its memory is gone
  hidesResuming,   // a beat names a lease as suspended while it is being resumed
  overstates,      // a server says that more of its memory may be leased than it can manage by turns
  hidesContexts,   // a server says of real GPUs that they are software GPUs, which keep nothing aside
  losesCordons,    // the disk loses that servers are cordoned
  hidesSessions,   // a server says that no session has moved to it, whatever has
  setsCalendar,    // the machine's calendar is set forward by an hour whenever the manager is started again
  keepsDevices,    // a server says that a lease has left its devices, and keeps them for it
  earlyHolds,      // a server says that a lease is held before its sessions have left
  forgetsHolds,    // the disk loses that leases are held
  hidesReturns,    // a restarted server goes on with leases, and does not say so
};

struct Result {
  std::string fault;  // what the checker found; "": nothing
  uint64_t leases = 0, restarts = 0, stalls = 0, kills = 0, partitions = 0, fullDisks = 0, lostStores = 0,
           twins = 0, suspends = 0, resumes = 0, crowded = 0, cordons = 0, migrations = 0, arrivals = 0,
           ordered = 0, limited = 0, checkpoints = 0, adoptions = 0, unused = 0, holds = 0, restores = 0,
           preempted = 0, noticed = 0, readopted = 0;
};

Result runHistory(uint64_t seed, Bug bug = Bug::none);

}  // namespace gpupool::history
