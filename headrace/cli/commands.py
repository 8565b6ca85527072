"""The commands of `headrace` and the modules that hold them, in the sections of its help."""

# section -> name -> module and function, or group of subcommands
SECTIONS = {
    "Begin": {
        "demo": "demo:demo",
        "up": "up:up",
        "config": "config:app",
        "data": "data:app",
        "env": "env:app",
        "model": "model:model",
        "migrate": "migrate:app",
    },
    "Watch a run": {
        "page": "page:page",
        "status": "status:status",
        "runs": "run_list:app",
        "samples": "samples:samples",
        "groups": "groups:app",
    },
    "Use and change a run": {
        "eval": "evaluate:evaluate",
        "serve": "serve:serve",
        "export": "export:export",
        "rewind": "rewind:rewind",
        "rescore": "rescore:rescore",
        "replay-step": "replay_step:replay_step",
    },
    "Scale and deploy": {
        "plan": "plan:app",
        "autoscale": "autoscale:autoscale",
        "deploy": "deploy:app",
        "preemption-watch": "preemption:preemption_watch",
    },
    "One service at a time": {
        "replay": "services:replay",
        "reward": "services:reward",
        "rollout": "services:rollout",
        "agents": "services:agents",
        "trainer": "services:trainer",
    },
    "Secure": {
        "credentials": "credentials:credentials",
        "certs": "certs:certs",
        "acl": "acl:acl",
        "functions": "functions:functions",
    },
}
