# A room is a folder that is a target: what stands in it may include its own headers and those of
# the rooms that its link line names, or that they name in turn. The linker checks calls,
# tests/rooms.py checks includes.
#
#   bulkhead_room(TARGET FOLDER [LINK room or library...] [PRIVATE library...] [INCLUDE room...])
#
# Sources: all of FOLDER's own .cpp. LINK is public. Of the rooms in INCLUDE it has the headers
# alone, and links nothing.
function(bulkhead_room target folder)
    cmake_parse_arguments(room "" "" "LINK;PRIVATE;INCLUDE" ${ARGN})
    file(GLOB sources CONFIGURE_DEPENDS ${folder}/*.cpp)
    add_library(${target} STATIC ${sources})
    target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
    target_link_libraries(${target} PUBLIC ${room_LINK} PRIVATE ${room_PRIVATE} $<BUILD_INTERFACE:project_warnings>)
    bulkhead_may_include(${CMAKE_CURRENT_SOURCE_DIR}/${folder} ${target} ${room_LINK} ${room_PRIVATE} ${room_INCLUDE})
endfunction()

# Of targets that no request runs through a small size counts.
function(bulkhead_small)
    foreach(target ${ARGN})
        target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-Os>)
    endforeach()
endfunction()

# Writes what SCRIPT DATA prints to HEADER at configure time, and again when SCRIPT or DATA has
# changed: C++ made from a file that other languages read too. HEADER lies under build/generated/;
# an unchanged one keeps its time.
function(bulkhead_generate script data header)
    execute_process(
        COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/${script} ${CMAKE_CURRENT_SOURCE_DIR}/${data} ${ARGN}
        OUTPUT_VARIABLE made COMMAND_ERROR_IS_FATAL ANY)
    file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/generated/${header} CONTENT "${made}")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${script} ${data})
endfunction()

# Says for tests/rooms.py what a folder that is not a room of its own may include.
function(bulkhead_may_include folder target)
    file(RELATIVE_PATH folder ${PROJECT_SOURCE_DIR} ${folder})
    list(JOIN ARGN " " allowed)
    set_property(GLOBAL APPEND PROPERTY BULKHEAD_ROOMS "${folder} ${target} ${allowed}")
endfunction()

function(bulkhead_write_rooms)
    get_property(rooms GLOBAL PROPERTY BULKHEAD_ROOMS)
    list(JOIN rooms "\n" text)
    file(WRITE ${PROJECT_BINARY_DIR}/rooms.txt "${text}\n")
endfunction()
