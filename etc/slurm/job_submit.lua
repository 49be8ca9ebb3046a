-- job_submit.lua of Slurm: jobs with --remote-gpus take licences, so that Slurm starts no more of them than the pool has
-- GPUs for. A GPU of any model is the licence `remote_gpu`; one of a named model is `remote_gpu_MODEL` besides. Give
-- their numbers in slurm.conf:  Licenses=remote_gpu:16,remote_gpu_h200:8
--
-- Jobs with --remote-gpu-mem take as many as those with whole GPUs, unless licences are parts of GPUs. Then
-- /etc/slurm/job_submit.lua is, with as many licences as there are parts:
--     dofile("/usr/share/gpupool/slurm/job_submit.lua")
--     gpupool.parts = 8                                   -- of each GPU: Licenses=remote_gpu:128,remote_gpu_h200:64
--     gpupool.memory = { h200 = "140G", a100 = "80G" }    -- of a GPU, by model, as `gpupool devices` shows it
--     return slurm.SUCCESS
-- A site that has a job_submit.lua of its own calls from there:
--     dofile("/usr/share/gpupool/slurm/job_submit.lua")   -- before its own functions
--     local status = gpupool.submit(job_desc)             -- in slurm_job_submit
--     if status ~= slurm.SUCCESS then return status end
gpupool = { licence = "remote_gpu", most = 8, parts = 1, memory = {} }

-- What --remote-gpus and --remote-gpu-mem are for a job that is submitted; nil where they are not there.
-- Slurm hands them over as lines NAME=VALUE, which users can make up.
function gpupool.options(job_desc)
  local found = {}
  for _, line in pairs(job_desc.spank_job_env or {}) do
    local name, value = tostring(line):match("^_SLURM_SPANK_OPTION_gpupool_([a-z_]+)=(.*)$")
    if name then found[name] = value end
  end
  return found.remote_gpus, found.remote_gpu_mem
end

local function refuse(text)
  slurm.log_user("gpupool: " .. text)
  return slurm.ERROR
end

local function given(number) return number ~= nil and number ~= slurm.NO_VAL and number ~= 0 end

-- Licences are counted before Slurm chooses the nodes, so their number has to be fixed. Without -N a job of one task
-- has one node.
local function fix_nodes(job_desc)
  local least, most = job_desc.min_nodes, job_desc.max_nodes
  if not given(least) and not given(most) then
    if given(job_desc.num_tasks) and job_desc.num_tasks > 1 then return nil end
    job_desc.min_nodes, job_desc.max_nodes = 1, 1
    return 1
  end
  if not given(most) then
    job_desc.max_nodes = least
    most = least
  end
  if least ~= most then return nil end
  return least
end

local mebibytes = { M = 1, G = 1024, T = 1024 * 1024 }
local function size_of(text)
  local number, unit = tostring(text):match("^([1-9]%d*)([MGT])i?B?$")
  return number and tonumber(number) * mebibytes[unit]
end

-- MiB of a GPU of that model. Of any model: of the smallest, for the job may get that one.
local function memory_of(model)
  if model then return size_of(gpupool.memory[model]) end
  local least
  for _, text in pairs(gpupool.memory) do
    local size = size_of(text)
    if size and (not least or size < least) then least = size end
  end
  return least
end

-- The parts of a GPU that a job takes which wants `size` of its memory; nil: no GPU has so much.
local function parts_of(model, size)
  local whole = memory_of(model)
  if not size or not whole then return gpupool.parts end
  local parts = math.ceil(size_of(size) * gpupool.parts / whole)
  if parts <= gpupool.parts then return parts end
  if model then return nil end
  return gpupool.parts  -- it gets a larger one
end

function gpupool.submit(job_desc)
  local wish, size = gpupool.options(job_desc)
  if wish == nil and size == nil then return slurm.SUCCESS end
  if wish == nil then return refuse("--remote-gpu-mem: say also how many GPUs, for example --remote-gpus=1") end
  local count, model = wish:match("^([1-9]%d?)$"), nil
  if not count then count, model = wish:match("^([1-9]%d?):([%w%._%-]+)$") end
  count = tonumber(count)
  if not count or count > gpupool.most or #(model or "") > 40 then
    return refuse("--remote-gpus: '" .. wish .. "' is not N or N:MODEL (N: 1 to " .. gpupool.most ..
      "), for example 2 or 2:h200")
  end
  if size and not size:match("^[1-9]%d*[MGT]$") and not size:match("^[1-9]%d*[MGT]iB$") then
    return refuse("--remote-gpu-mem: '" .. size .. "' is not a size, for example 20G or 512M")
  end
  local nodes = fix_nodes(job_desc)
  if not nodes then
    return refuse("--remote-gpus is for each node: say how many nodes, one number (for example -N 2)")
  end
  model = model and model:lower()
  local parts = parts_of(model, size)
  if not parts then return refuse("--remote-gpu-mem: no " .. model .. " has " .. size .. " of memory") end
  local number = string.format("%d", parts * count * nodes)
  local wanted = gpupool.licence .. ":" .. number
  if model then wanted = wanted .. "," .. gpupool.licence .. "_" .. model .. ":" .. number end
  if (job_desc.licenses or "") ~= "" then wanted = job_desc.licenses .. "," .. wanted end
  job_desc.licenses = wanted
  return slurm.SUCCESS
end

function slurm_job_submit(job_desc, part_list, submit_uid)
  return gpupool.submit(job_desc)
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
  return slurm.SUCCESS
end

slurm.log_info("gpupool: jobs with --remote-gpus take licences")
return slurm.SUCCESS
