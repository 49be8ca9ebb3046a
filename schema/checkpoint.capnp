@0xc7d29a5f1e3b8406;
# A checkpoint: a lease's sessions in files (server/files/). A folder with `manifest`, and a file for each session, which
# holds what its worker sends to one that rebuilds it, as server/worker/session_state.h says. `manifest` is one flat message
# of this and its SHA-256.
using Cxx = import "/capnp/c++.capnp";
using import "inventory.capnp".Id128;
$Cxx.namespace("gpupool::schema");

const checkpointVersion :UInt32 = 2;

struct Checkpoint {
  version @0 :UInt32;             # checkpointVersion
  id @1 :Id128;                   # its own
  lease @2 :Id128;
  tenant @3 :Text;
  holder @4 :Text;                # for people
  server @5 :Text;                # that has written it
  writtenS @6 :UInt64;            # since 1970
  held @7 :Bool;                  # the sessions have not gone on since
  rowsHash @8 :UInt64;            # of its server's current worker program
  driverVersion @9 :UInt32;       # cuDriverGetVersion
  devices @10 :List(CheckpointDevice);    # of the lease, in its order
  sessions @11 :List(CheckpointSession);
}
struct CheckpointDevice {
  name @0 :Text;
  software @1 :Bool;
  totalBytes @2 :UInt64;
  memoryBytes @3 :UInt64;         # the lease's
}
struct CheckpointSession {
  session @0 :Id128;
  epoch @1 :UInt64;
  clientPid @2 :UInt32;
  command @3 :Text;               # for people
  transport @4 :Text;
  lastFrame @5 :UInt64;
  file @6 :Text;                  # its name in the folder
  bytes @7 :UInt64;
  digest @8 :Data;                # SHA-256 of the digests in the file, in their order: of the record, of each image (its
                                  # name), and the checksum of each part of the contents
  rowsHash @9 :UInt64;            # of its worker; 0: Checkpoint.rowsHash
}
