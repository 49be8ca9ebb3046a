// Events (Event Management).
// Rows: see schema/rows.h. No include guard: included once per meaning of CALL.
// clang-format off
CALL(cuEventCreate, Policy, Generated, Mints<"phEvent">, In<"Flags">)
CALL(cuEventRecord, Policy, None)
CALL(cuEventRecordWithFlags, Policy, None)
CALL(cuEventQuery, Policy, Checked | Polls, Handle<"hEvent">)
CALL(cuEventSynchronize, Policy, None)
CALL(cuEventDestroy, Policy | Cleanup, None)
CALL(cuEventDestroy_v2, Policy | Cleanup, Checked, Frees<"hEvent">)
CALL(cuIpcGetEventHandle, Policy, None)
CALL(cuIpcOpenEventHandle, Policy, None)
CALL(cuEventElapsedTime, Policy, None)
CALL(cuEventElapsedTime_v2, Policy, Checked | Varies, Out<"pMilliseconds">, Handle<"hStart">, Handle<"hEnd">)
// clang-format on
