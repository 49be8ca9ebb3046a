@0xbc4f4907841561d1;
# What there is in the pool: servers, their GPUs and RDMA devices, and their worker programs.
# The ids are those that these had in pool.capnp, as in worker.capnp, session.capnp and store.capnp.

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("gpupool::schema");

struct Id128 @0xd0e905b964fbc4a4 { high @0 :UInt64; low @1 :UInt64; }

struct DeviceInfo @0xfa53cc5a4addd1bd {
  uuid @0 :Data;              # 16 bytes, as cuDeviceGetUuid gives it
  name @1 :Text;
  memoryBytes @2 :UInt64;
  computeMajor @3 :UInt32;
  computeMinor @4 :UInt32;
  pciBusId @5 :Text;
  ordinal @6 :UInt32;         # the driver's ordinal on its server
  software @7 :Bool;          # the software GPU
  problem @8 :Text;           # not empty: nothing is placed on it, and why; for people
  driverVersion @9 :UInt32;   # cuDriverGetVersion
}

struct LeasedDevice @0xd642aa8a853df087 {
  info @0 :DeviceInfo;
  memoryBytes @1 :UInt64;     # reserved for the lease
}

struct DeviceState @0x84a18b4ba03e0463 {
  info @0 :DeviceInfo;
  server @1 :Text;            # server name
  freeBytes @2 :UInt64;       # not reserved by any lease
  leases @3 :List(Id128);
  sample @4 :DeviceSample;    # null: its server takes none, or has not lately
}

# What a server saw last of one of its GPUs, by NVML (schema/device_sample.h). A default says that the GPU or its driver
# does not tell.
struct DeviceSample @0xdb910034aea3db32 {
  ageMs @0 :UInt32;           # since it was taken
  gpuPercent @1 :Int32 = -1;  # nvmlDeviceGetUtilizationRates
  memoryPercent @2 :Int32 = -1;
  usedBytes @3 :UInt64;       # nvmlDeviceGetMemoryInfo
  totalBytes @4 :UInt64;
  temperatureC @5 :Int32 = -1000;
  powerMw @6 :UInt32;
  powerLimitMw @7 :UInt32;    # nvmlDeviceGetEnforcedPowerLimit
  smMhz @8 :UInt32;
  memoryMhz @9 :UInt32;
  eccErrors @10 :Int64 = -1;  # uncorrected, volatile
  nvlinks @11 :Int32 = -1;    # that are up
  xid @12 :UInt32;            # the last critical one since the server was started; 0: none
}

struct ServerInfo @0xa49fc7a3c5b095cd {
  name @0 :Text;              # unique in the pool; the host name by default
  incarnation @1 :Id128;      # new at every start of the server
  localPath @2 :Text;         # Unix socket for sessions of this host; empty: none
  host @3 :Text;              # where network sessions connect; empty: none
  port @4 :UInt16;
  bootId @5 :Text;            # /proc/sys/kernel/random/boot_id: tells whether a client is on the same host
  devices @6 :List(DeviceInfo);
  rowsHash @7 :UInt64;
  pid @8 :UInt32;
  fabric @9 :Fabric;          # for people and for placement; not in a lease's copy of this
  leftOut @10 :List(Text);    # GPUs of the host that this server does not offer, and why; for people
  overcommitPercent @11 :UInt32 = 100;  # of each device's memory, so much may be leased: above 100, leases take turns
  walls @12 :List(Text);        # that stand around each of its workers, by name (server/walls/walls.h); for people
  missingWalls @13 :List(Text); # those that do not, with the reason; for people
  workers @14 :List(WorkerVersion);   # whose sessions it takes, the current program first; empty: rowsHash's alone
  keepBytes @15 :UInt64;      # of its memory for checkpoints, those of other servers' leases too (ServerControl.keep); 0: it
                              # keeps none
}
# A worker program of a server, or a client library: it serves clients that have the same rows.
struct WorkerVersion @0x9e4a23846975a42a {
  rowsHash @0 :UInt64;        # schema::rowsHash(); of a client, 0: it is not known
  release @1 :Text;           # of gpupool; for people
}

# What a joining server knows of one of its devices from before: its server may have been restarted, and so may the
# manager.
struct DeviceReport @0xac982e0a122c1148 {
  highestEpoch @0 :UInt64;    # the server refuses every grant that is not above it
  running @1 :List(Id128);    # leases whose workers still live there, of this life of the server or of an earlier one;
                              # while one of an earlier life does, DeviceInfo.problem says so and grants are refused
}

# What a server's GPUs reach others by: its RDMA devices, as libibverbs and sysfs tell, and NVLinks between its GPUs, as
# NVML does. How many of each there may be: schema/fabric.h.
struct Fabric @0xd49575f495247b6e {
  devices @0 :List(FabricDevice);
  note @1 :Text;              # why there are none, or not all; for people
  nvlinks @2 :List(UInt64);   # of each of ServerInfo.devices: those that NVLink joins it with, directly or by switches,
                              # as bits (1 << index); empty: not known
}

struct FabricDevice @0xe3e3f94310c5f55e {
  name @0 :Text;              # mlx5_0
  nodeGuid @1 :UInt64;
  transport @2 :Text;         # InfiniBand, iWARP, ...
  firmware @3 :Text;
  pciAddress @4 :Text;        # as sysfs writes it; empty: none (Soft-RoCE on a virtual interface)
  numaNode @5 :Int32 = -1;    # -1: unknown
  gpuDistances @6 :List(PciDistance);   # to each of ServerInfo.devices, in that order
  dmaBuf @7 :DmaBuf;          # can memory regions be made of dma-buf descriptors (GPUDirect)?
  dmaBufReason @8 :Text;      # what the probe said
  problem @9 :Text;           # not empty: it could not be opened or asked, and why
  ports @10 :List(FabricPort);
}

struct FabricPort @0xe80dab064f82e3dd {
  number @0 :UInt32;
  state @1 :PortState;
  linkLayer @2 :LinkLayer;
  rateMbps @3 :UInt32;        # megabits a second
  mtu @4 :UInt32;             # bytes
  lid @5 :UInt32;
  netdev @6 :Text;
  gids @7 :List(FabricGid);
  defaultGid @8 :Int32 = -1;  # the index to connect with; -1: none
}

struct FabricGid @0x90f2614666b130ba {
  index @0 :UInt32;
  value @1 :Data;             # 16 bytes
  type @2 :GidType;
}

enum PortState @0xda26242c219bac9d { unknown @0; down @1; initializing @2; armed @3; active @4; activeDeferred @5; }  # ibv_port_state
enum LinkLayer @0xa6316996639ae861 { unknown @0; infiniBand @1; ethernet @2; }
enum GidType @0x8be92a17167a0353 { unknown @0; infiniBand @1; roceV1 @2; roceV2 @3; }
enum DmaBuf @0xa228e103b6f32986 { unknown @0; supported @1; unsupported @2; }
# What lies between two PCI devices, in nvidia-smi's words: at most one bridge each (pix), several bridges (pxb), the host
# bridge (phb), host bridges of one NUMA node (node), NUMA nodes (sys).
enum PciDistance @0xa231dd6b41881c0b { unknown @0; pix @1; pxb @2; phb @3; node @4; sys @5; }
