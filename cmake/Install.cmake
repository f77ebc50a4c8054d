# cmake --install build [--prefix DIR] [--component client|daemon]
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# The C++ client: headers, archives, and what find_package(Bulkhead) reads.
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Bulkhead)
# A name such as libipc_base.a is nothing for a common folder.
set(archive_dir ${CMAKE_INSTALL_LIBDIR}/bulkhead)
set_target_properties(bulkhead_client PROPERTIES EXPORT_NAME client)
# What users give to -I: they include <bulkhead/channel.h>.
set(headers_dir ${CMAKE_INSTALL_INCLUDEDIR}/bulkhead)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/clients/cpp/include/bulkhead DESTINATION ${headers_dir} COMPONENT client)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/ipc DESTINATION ${headers_dir} COMPONENT client
    FILES_MATCHING REGEX "/(base/(error|unique_fd)|channel/dtype|cuda/(gpu|driver|driver_types))[.]h$")
install(FILES ${PROJECT_BINARY_DIR}/generated/ipc/base/error_code.h DESTINATION ${headers_dir}/ipc/base COMPONENT client)
install(FILES ${PROJECT_BINARY_DIR}/generated/ipc/channel/wire.h DESTINATION ${headers_dir}/ipc/channel COMPONENT client)
install(TARGETS bulkhead_client client_headers ipc ipc_base ipc_channel ipc_slab ipc_ring ipc_links ipc_cuda boost_headers fmt_library
    EXPORT BulkheadTargets
    ARCHIVE DESTINATION ${archive_dir} COMPONENT client
    INCLUDES DESTINATION ${headers_dir})
install(EXPORT BulkheadTargets NAMESPACE Bulkhead:: DESTINATION ${package_dir} COMPONENT client)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/BulkheadConfig.cmake.in ${PROJECT_BINARY_DIR}/BulkheadConfig.cmake
    INSTALL_DESTINATION ${package_dir})
# Before 1.0 a minor version may change what a program is compiled against.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/BulkheadConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/BulkheadConfig.cmake ${PROJECT_BINARY_DIR}/BulkheadConfigVersion.cmake
    DESTINATION ${package_dir} COMPONENT client)
configure_file(${CMAKE_CURRENT_LIST_DIR}/bulkhead-client.pc.in ${PROJECT_BINARY_DIR}/bulkhead-client.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/bulkhead-client.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT client)

# The daemon: its programs look for one another in the folder where they lie. The worker of
# `runtime: python`, at the place beside the programs where the supervisor looks for it.
install(DIRECTORY ${PROJECT_SOURCE_DIR}/clients/python/bulkhead DESTINATION ${CMAKE_INSTALL_DATADIR}/bulkhead/python
    COMPONENT daemon PATTERN __pycache__ EXCLUDE PATTERN "*.json" EXCLUDE)
install(FILES ${PROJECT_SOURCE_DIR}/ipc/channel/wire.json ${PROJECT_SOURCE_DIR}/ipc/links/worker_link.json
    ${PROJECT_SOURCE_DIR}/ipc/links/control.json
    DESTINATION ${CMAKE_INSTALL_DATADIR}/bulkhead/python/bulkhead COMPONENT daemon)
install(TARGETS bulkheadd bulkhead-supervisor bulkhead RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT daemon)
foreach(target bulkhead-worker bulkhead_cuda)
    if(TARGET ${target})
        # Where LibTorch lies.
        set_target_properties(${target} PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
        install(TARGETS ${target} DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT daemon)
    endif()
endforeach()
install(FILES ${PROJECT_SOURCE_DIR}/scripts/systemd/bulkhead.service DESTINATION lib/systemd/system COMPONENT daemon)
install(FILES ${PROJECT_SOURCE_DIR}/scripts/completion/bulkhead.bash RENAME bulkhead
    DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions COMPONENT daemon)
