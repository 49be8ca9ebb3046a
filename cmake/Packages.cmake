# Installing, Debian packages and the client's archive.
#   cmake --install build/release --prefix /opt/gpupool     everything, without configuration files and services
#   ninja -C build/release packages                         build/release/packages/*.deb and the client's archive
#
# Programs find what belongs to them beside themselves (../lib/gpupool), so a tree can be moved as a whole.
# The client's libcuda.so.1 and libnvidia-ml.so.1 are in a folder of their own, which is on no loader's path: whoever wants
# them says so.
install(TARGETS gpupool RUNTIME DESTINATION bin COMPONENT client)
install(TARGETS gpupool-client gpupool-nvml LIBRARY DESTINATION lib/gpupool COMPONENT client)
# What each program's --help says, as man pages; and bash's completion, which asks --help.
find_package(Python3 COMPONENTS Interpreter REQUIRED)
set(man ${CMAKE_BINARY_DIR}/man)
add_custom_command(OUTPUT ${man}/done
  COMMAND ${CMAKE_COMMAND} -E rm -rf ${man}
  COMMAND Python3::Interpreter ${CMAKE_SOURCE_DIR}/scripts/man_pages ${CMAKE_RUNTIME_OUTPUT_DIRECTORY} ${man}
  COMMAND ${CMAKE_COMMAND} -E touch ${man}/done
  DEPENDS gpupool gpupool-manager gpupool-server ${CMAKE_SOURCE_DIR}/scripts/man_pages VERBATIM)
add_custom_target(man_pages ALL DEPENDS ${man}/done)
foreach(part manager server)
  install(FILES ${man}/gpupool-${part}.1.gz DESTINATION share/man/man1 COMPONENT ${part})
endforeach()
install(DIRECTORY ${man}/ DESTINATION share/man/man1 COMPONENT client FILES_MATCHING PATTERN *.gz
  PATTERN gpupool-manager.1.gz EXCLUDE PATTERN gpupool-server.1.gz EXCLUDE)
install(FILES etc/completion/gpupool.bash DESTINATION share/bash-completion/completions RENAME gpupool COMPONENT client)
install(FILES LICENSE DESTINATION share/doc/gpupool-client COMPONENT client)
install(TARGETS gpupool-server gpupool-spawner gpupool-worker RUNTIME DESTINATION bin COMPONENT server)
install(TARGETS gpupool-manager RUNTIME DESTINATION bin COMPONENT manager)
get_target_property(soft_is_imported cuda-soft IMPORTED)
if(NOT soft_is_imported)
  install(TARGETS cuda-soft LIBRARY DESTINATION lib/gpupool COMPONENT software-gpu)
endif()
# For Slurm, where its headers are: the plugin, and the scripts beside slurmctld.
if(TARGET spank_gpupool)
  install(TARGETS spank_gpupool LIBRARY DESTINATION lib/gpupool/slurm COMPONENT slurm)
  install(PROGRAMS etc/slurm/prolog_slurmctld etc/slurm/epilog_slurmctld etc/slurm/reap
          DESTINATION share/gpupool/slurm COMPONENT slurm)
  install(FILES etc/slurm/common.sh etc/slurm/job_submit.lua etc/slurm/gpupool.conf etc/slurm/plugstack.conf
          DESTINATION share/gpupool/slurm COMPONENT slurm)
  install(FILES etc/systemd/gpupool-slurm-reap.service etc/systemd/gpupool-slurm-reap.timer
          DESTINATION /usr/lib/systemd/system COMPONENT slurm-system EXCLUDE_FROM_ALL)
endif()

# For packages alone: what a service needs to start. The files of etc/ show every default; those of a
# package say where its service's folders are, so that nothing on a command line wins over them.
function(gpupool_packaged_config name) # old new...
  file(READ ${CMAKE_SOURCE_DIR}/etc/${name} text)
  while(ARGN)
    list(POP_FRONT ARGN old new)
    string(FIND "${text}" "\n${old}\n" at)
    if(at EQUAL -1)
      message(FATAL_ERROR "etc/${name}: there is no line '${old}'")
    endif()
    string(REPLACE "\n${old}\n" "\n${new}\n" text "${text}")
  endwhile()
  file(WRITE ${CMAKE_BINARY_DIR}/packaging/${name}.new "${text}")
  file(COPY_FILE ${CMAKE_BINARY_DIR}/packaging/${name}.new ${CMAKE_BINARY_DIR}/packaging/${name} ONLY_IF_DIFFERENT)
endfunction()
gpupool_packaged_config(client.yaml)
gpupool_packaged_config(server.yaml "state: \"\"" "state: \"/run/gpupool-server\"")
gpupool_packaged_config(manager.yaml
  "listen: \"\"" "listen: \"*:4780\"" "socket: \"\"" "socket: \"/run/gpupool/manager.sock\"")
foreach(part client server manager)
  install(FILES ${CMAKE_BINARY_DIR}/packaging/${part}.yaml DESTINATION /etc/gpupool
          COMPONENT ${part}-system EXCLUDE_FROM_ALL)
endforeach()
foreach(part server manager)
  install(FILES etc/systemd/gpupool-${part}.service DESTINATION /usr/lib/systemd/system
          COMPONENT ${part}-system EXCLUDE_FROM_ALL)
endforeach()

set(CPACK_PACKAGE_NAME gpupool)
set(CPACK_PACKAGE_VENDOR gpupool)
set(CPACK_PACKAGE_CONTACT "gpupool <gpupool@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "GPUs of a few servers for machines that have none")
set(CPACK_STRIP_FILES ON)
set(CPACK_SET_DESTDIR ON)
set(CPACK_INSTALL_PREFIX /usr)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SECTION admin)
set(CPACK_OUTPUT_FILE_PREFIX ${CMAKE_BINARY_DIR}/packages)
set(CPACK_PROJECT_CONFIG_FILE ${CMAKE_SOURCE_DIR}/cmake/PackageKinds.cmake)
set(CPACK_COMPONENTS_ALL client client-system server server-system manager manager-system software-gpu)
foreach(part client server manager)
  string(TOUPPER ${part} upper)
  set(CPACK_COMPONENT_${upper}_GROUP ${part})
  set(CPACK_COMPONENT_${upper}-SYSTEM_GROUP ${part})
endforeach()
set(CPACK_COMPONENT_SOFTWARE-GPU_GROUP software-gpu)
if(TARGET spank_gpupool)
  list(APPEND CPACK_COMPONENTS_ALL slurm slurm-system)
  set(CPACK_COMPONENT_SLURM_GROUP slurm)
  set(CPACK_COMPONENT_SLURM-SYSTEM_GROUP slurm)
endif()
set(CPACK_COMPONENTS_GROUPING ONE_PER_GROUP)

function(gpupool_package group text)
  string(TOUPPER ${group} upper)
  set(CPACK_DEBIAN_${upper}_PACKAGE_NAME gpupool-${group} PARENT_SCOPE)
  set(CPACK_DEBIAN_${upper}_FILE_NAME DEB-DEFAULT PARENT_SCOPE)
  set(CPACK_DEBIAN_${upper}_DESCRIPTION "${text}" PARENT_SCOPE)
endfunction()
gpupool_package(client "GPUs of a pool for this machine
The command gpupool, a libcuda.so.1 that forwards CUDA programs to the GPUs that they lease, and a libnvidia-ml.so.1 that
shows these.")
gpupool_package(server "lends this machine's GPUs to a pool
The service gpupool-server and its worker processes.")
gpupool_package(manager "manages a pool of GPUs
The service gpupool-manager: which servers offer GPUs, and who leases them.")
gpupool_package(software-gpu "a GPU in software, to try gpupool without one
Compiles PTX for the processor; for tests, not for speed.")
gpupool_package(slurm "GPUs of a pool for the jobs of a Slurm cluster
A plugin for Slurm's commands and nodes, and scripts for its controller.")
# UCX is opened when a program runs: without it, there is shared memory on one machine.
set(CPACK_DEBIAN_CLIENT_PACKAGE_RECOMMENDS libucx0)
set(CPACK_DEBIAN_SERVER_PACKAGE_RECOMMENDS libucx0)
set(CPACK_DEBIAN_SERVER_PACKAGE_SUGGESTS gpupool-software-gpu)
set(CPACK_DEBIAN_SLURM_PACKAGE_DEPENDS "gpupool-client")
# What connects to the manager speaks TLS. Ubuntu 24.04's name is the second.
set(ssl "libssl3 | libssl3t64")
set(CPACK_DEBIAN_CLIENT_PACKAGE_DEPENDS "${ssl}")
set(CPACK_DEBIAN_SERVER_PACKAGE_DEPENDS "adduser, ${ssl}")
set(CPACK_DEBIAN_MANAGER_PACKAGE_DEPENDS "adduser, ${ssl}")

# dpkg asks before it replaces a configuration file that was changed.
foreach(part client server manager)
  set(folder ${CMAKE_BINARY_DIR}/packaging/${part})
  file(WRITE ${folder}/conffiles "/etc/gpupool/${part}.yaml\n")
  set(control ${folder}/conffiles)
  if(NOT part STREQUAL client)
    foreach(script preinst postinst prerm postrm)
      if(NOT EXISTS ${CMAKE_SOURCE_DIR}/etc/debian/${part}.${script})
        continue()
      endif()
      configure_file(etc/debian/${part}.${script} ${folder}/${script} COPYONLY)
      file(CHMOD ${folder}/${script} PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE
           WORLD_READ WORLD_EXECUTE)
      list(APPEND control ${folder}/${script})
    endforeach()
  endif()
  string(TOUPPER ${part} upper)
  set(CPACK_DEBIAN_${upper}_PACKAGE_CONTROL_EXTRA "${control}")
  set(CPACK_DEBIAN_${upper}_PACKAGE_CONTROL_STRICT_PERMISSION ON)
endforeach()
include(CPack)
add_custom_target(packages
  COMMAND ${CMAKE_CPACK_COMMAND} --config ${CMAKE_BINARY_DIR}/CPackConfig.cmake -G DEB
  COMMAND ${CMAKE_CPACK_COMMAND} --config ${CMAKE_BINARY_DIR}/CPackConfig.cmake -G TXZ
  DEPENDS man_pages gpupool gpupool-client gpupool-nvml gpupool-server gpupool-spawner gpupool-worker gpupool-manager cuda-soft
    $<$<TARGET_EXISTS:spank_gpupool>:spank_gpupool>
  WORKING_DIRECTORY ${CMAKE_BINARY_DIR} USES_TERMINAL VERBATIM)
