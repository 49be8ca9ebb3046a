// Virtual memory (Virtual Memory Management).
// Rows: see schema/rows.h. No include guard: included once per meaning of CALL.
// clang-format off
CALL(cuMemAddressReserve, Policy, None)
CALL(cuMemAddressFree, Policy | Cleanup, None)
CALL(cuMemCreate, Policy, None)
CALL(cuMemRelease, Policy | Cleanup, None)
CALL(cuMemMap, Policy, None)
CALL(cuMemUnmap, Policy, None)
CALL(cuMemSetAccess, Policy, None)
CALL(cuMemGetAccess, Policy, None)
CALL(cuMemGetAllocationGranularity, Policy, None)
CALL(cuMemGetAllocationPropertiesFromHandle, Policy, None)
CALL(cuMemRetainAllocationHandle, Policy, None)
CALL(cuMemExportToShareableHandle, Policy, None)
CALL(cuMemImportFromShareableHandle, Policy, None)
// clang-format on
