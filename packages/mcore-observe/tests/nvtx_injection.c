/* Prints every NVTX range of a process: loaded by NVTX itself from NVTX_INJECTION64_PATH. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef void (*function_t)(void);
typedef struct {
  size_t struct_size;
  int (*get_module_function_table)(int module, function_t*** table, unsigned* size);
} callbacks_t;
typedef struct {
  uint16_t version, size;
  uint32_t category;
  int32_t color_type;
  uint32_t color;
  int32_t payload_type, reserved;
  uint64_t payload;
  int32_t message_type; /* 1: ASCII, 3: registered */
  const char* message;
} attributes_t;

enum { EXPORT_CALLBACKS = 1, MODULE_CORE = 1, MODULE_CORE2 = 5 };
enum { RANGE_START_A = 5, RANGE_END = 7, RANGE_PUSH_A = 9, RANGE_POP = 11 };
enum { DOMAIN_START = 2, DOMAIN_END = 3, DOMAIN_PUSH = 4, DOMAIN_POP = 5 };
enum { DOMAIN_REGISTER_A = 10, DOMAIN_CREATE_A = 12 };

static uint64_t last_id = 0;

static int push(const char* name) { return printf("push %s\n", name), fflush(stdout), 0; }
static int pop(void) { return puts("pop"), fflush(stdout), 0; }
static uint64_t start(const char* name) { return printf("start %s\n", name), ++last_id; }
static void end(uint64_t id) { printf("end %llu\n", (unsigned long long)id), fflush(stdout); }

/* Domains and registered strings are represented by their names. */
static const char* domain_create(const char* name) { return name; }
static const char* domain_register(const char* domain, const char* text) { return text; }
static int domain_push(const char* domain, const attributes_t* a) {
  return printf("push %s:%s #%06x\n", domain, a->message, a->color & 0xffffff), fflush(stdout), 0;
}
static int domain_pop(const char* domain) { return printf("pop %s\n", domain), fflush(stdout), 0; }
static uint64_t domain_start(const char* domain, const attributes_t* a) {
  return printf("start %s:%s\n", domain, a->message), ++last_id;
}
static void domain_end(const char* domain, uint64_t id) { end(id); }

int InitializeInjectionNvtx2(const void* (*get_export_table)(uint32_t)) {
  const callbacks_t* callbacks = get_export_table(EXPORT_CALLBACKS);
  function_t** table;
  unsigned size;
  if (!callbacks || !callbacks->get_module_function_table(MODULE_CORE, &table, &size)) return 0;
  *table[RANGE_PUSH_A] = (function_t)push;
  *table[RANGE_POP] = (function_t)pop;
  *table[RANGE_START_A] = (function_t)start;
  *table[RANGE_END] = (function_t)end;
  if (!callbacks->get_module_function_table(MODULE_CORE2, &table, &size)) return 0;
  *table[DOMAIN_PUSH] = (function_t)domain_push;
  *table[DOMAIN_POP] = (function_t)domain_pop;
  *table[DOMAIN_START] = (function_t)domain_start;
  *table[DOMAIN_END] = (function_t)domain_end;
  *table[DOMAIN_REGISTER_A] = (function_t)domain_register;
  *table[DOMAIN_CREATE_A] = (function_t)domain_create;
  return 1;
}
